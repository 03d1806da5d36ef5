"""Which method is slowed down least by a straggler? The same budget of samples for three methods, side by side."""

import manyhands as mh

METHODS = {
    "bsp": mh.bsp(),
    "ssp, s = 3": mh.ssp(staleness=3),
    "ad-psgd": mh.ad_psgd(),
}


def main() -> None:
    print(f"{'method':12} {'even':>9} {'straggler':>10} {'waited':>8} {'accuracy':>9}")
    for name, method in METHODS.items():
        even = mh.train("digits", method, cluster=mh.Cluster(workers=4), epochs=10)
        cluster = mh.Cluster(workers=4, stragglers=mh.Slow([0], 5))
        slow = mh.train("digits", method, cluster=cluster, epochs=10)
        waited = slow.waited_seconds / (4 * slow.seconds)
        print(f"{name:12} {even.seconds:8.3f}s {slow.seconds:9.3f}s {waited:8.0%} {slow.test_accuracy:9.3f}")


if __name__ == "__main__":
    main()
