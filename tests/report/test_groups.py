"""Groups: what differs in its seed only is one; what may not stand on one axis is in different sections."""

from manyhands.report.groups import sections
from synthetic_runs import made


def names(*runs):
    return [group.name for section in sections(runs) for group in section.groups]


def test_seeds_are_one_group():
    (section,) = sections([made(seed=0), made(seed=1), made(seed=2, method="bsp")])
    assert [group.name for group in section.groups] == ["ssp:staleness=3", "bsp"]
    assert [member.label for member in section.members] == [
        "ssp:staleness=3, seed 0",
        "ssp:staleness=3, seed 1",
        "bsp, seed 2",
    ]


def test_what_else_differs_is_said():
    assert names(made(), made(workers=8), made(batch_size=64)) == [
        "ssp:staleness=3, 4 workers, batches of 32",
        "ssp:staleness=3, 8 workers, batches of 32",
        "ssp:staleness=3, 4 workers, batches of 64",
    ]
    fault = {"faults": [{"rank": 1, "at": 0.1, "why": "it died"}]}
    assert names(made(), made(cluster=fault)) == ["ssp:staleness=3", "ssp:staleness=3, with faults"]
    assert names(made(), made(cluster={"latency": "5ms"})) == ["ssp:staleness=3", "ssp:staleness=3, latency 5ms"]
    assert names(made(), made(replicas=2)) == ["ssp:staleness=3 (no. 1)", "ssp:staleness=3 (no. 2)"]


def test_twins_have_names_of_their_own(tmp_path):
    twins = [made(), made()]
    for number, run in enumerate(twins):
        run.path = tmp_path / f"run{number}" / "record.jsonl"
    (section,) = sections(twins)
    assert [member.label for member in section.members] == [
        "ssp:staleness=3, seed 0 (run0)",
        "ssp:staleness=3, seed 0 (run1)",
    ]


def test_tasks_and_kinds_of_time_are_kept_apart():
    parts = sections([made(), made(task="text"), made(world="real"), made(task="te xt"), made(task="te-xt")])
    assert [(part.task, part.seconds) for part in parts] == [
        ("digits", "virtual seconds"),
        ("text", "virtual seconds"),
        ("digits", "seconds"),
        ("te xt", "virtual seconds"),
        ("te-xt", "virtual seconds"),
    ]
    slugs = [part.slug for part in parts]
    assert slugs[:3] == ["digits-virtual", "text-virtual", "digits-real"]
    assert len(set(slugs)) == len(slugs)
