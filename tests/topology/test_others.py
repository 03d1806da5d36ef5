"""Others: what a list of all other ranks would do, without the list."""

from random import Random

import pytest

from manyhands.topology.peers import Others, shuffled


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_list_does(seed):
    draw = Random(seed)
    size = draw.randrange(1, 30)
    plain, others = list(range(size)), Others(range(size))
    while plain:
        if draw.random() < 0.3:
            rank = draw.randrange(size + 2)
            plain = [one for one in plain if one != rank]
            others.remove(rank)
        else:
            place = draw.randrange(len(plain))
            assert others.pop(place) == plain.pop(place)
        assert len(others) == len(plain)


def test_all_are_drawn_once_and_those_that_are_out_never():
    others = Others(range(9))
    others.remove(4)
    others.remove(4)
    assert sorted(shuffled(others, Random(1))) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert len(others) == 8
    assert list(shuffled(Others(()), Random(1))) == []


def test_the_order_is_that_of_drawing_from_a_list():
    draw, left = Random(7), list(range(50))
    expected = [left.pop(draw.randrange(len(left))) for _ in range(50)]
    assert list(shuffled(Others(range(50)), Random(7))) == expected
