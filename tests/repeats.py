"""Which cases of a test `make test` runs, and which repeat what these have shown: `make soak` runs those too.

A test of every method, size and world has hundreds of cases, most of which go through the same code. All of them find
what only one combination gets wrong, but not every time that something is changed.
"""

from itertools import product

import pytest


def repeated(case):
    """A case for `make soak` only: a value, or a tuple of values."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)


def only(stays, cases):
    """All cases, of which those that `stays` returns False for are repeated."""
    return [case if stays(case) else repeated(case) for case in cases]


def every(n, cases):
    """All cases, of which each n-th stays, the first one among them."""
    return [repeated(case) if number % n else case for number, case in enumerate(cases)]


def diagonals(n, *axes):
    """All combinations, of which those stay whose places add up to a multiple of n.

    Each value of an axis occurs among them, with the values of the others in turn, if another has n values or more.
    """
    places = product(*(range(len(axis)) for axis in axes))
    cases = product(*axes)
    return [repeated(case) if sum(at) % n else case for at, case in zip(places, cases, strict=True)]


def one_of_each(kind, cases):
    """All cases, of which the first of each kind stays."""
    firsts = {}
    for case in cases:
        firsts.setdefault(kind(case), case)
    return only(lambda case: firsts[kind(case)] == case, cases)
