"""Whole runs of every method, in both worlds, with every fault: too long for `make test`, `make soak` runs them."""
