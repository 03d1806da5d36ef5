"""Four ways to sum a vector over eight ranks: how many rounds, how many bytes, how long?

A ring sends the least, a butterfly takes the fewest rounds; which is faster depends on the length of the vector.
"""

import torch

import manyhands as mh
from manyhands.collectives import collective
from manyhands.core.port import Transport

RANKS = 8


def study(algorithm: str, length: int) -> str:
    """Run one algorithm on virtual ranks, check the sum, count rounds and bytes."""

    def program(transport: Transport) -> bool:
        x = torch.full((length,), float(transport.rank))
        collective(algorithm, transport, range(RANKS)).all_reduce(x)
        return bool((x == sum(range(RANKS))).all())

    run = mh.on_ranks(RANKS, program)
    assert all(run.results)
    return f"{length:9,} {algorithm:13} {run.rounds:6} {max(run.bytes):13,} {run.seconds * 1e6:9,.0f} us"


def main() -> None:
    print(f"{'length':>9} {'algorithm':13} {'rounds':>6} {'bytes (most)':>13} {'time':>12}")
    for length in (1_000, 1_000_000):
        for algorithm in ("tree", "butterfly", "ring", "rabenseifner"):
            print(study(algorithm, length))


if __name__ == "__main__":
    main()
