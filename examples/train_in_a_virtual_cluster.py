"""Train a small network in a virtual cluster: four workers, two servers, one of the workers five times slower.

The gradients are real and the clock is virtual: the run takes seconds of wall time and a fraction of a virtual second.
"""

import manyhands as mh


def main() -> None:
    cluster = mh.Cluster(workers=4, servers=2, bandwidth="10Gbit", latency="50us", stragglers=mh.Slow([0], 5))
    result = mh.train("digits", mh.ssp(staleness=3), cluster=cluster, epochs=10)
    print(f"test accuracy   {result.test_accuracy:.3f}")
    print(f"virtual time    {result.seconds:.3f} s, {result.samples_per_second:,.0f} samples/s")
    print(f"sent            {result.bytes_sent / 1e6:,.0f} MB")
    print(f"lag             {result.mean_lag:.1f} updates on average, {result.max_lag} at most")
    print(f"ahead by        {result.max_ahead} steps at most")
    steps = [sum(line.get("rank") == rank for line in result.records) for rank in range(4)]
    print(f"steps by rank   {steps}")


if __name__ == "__main__":
    main()
