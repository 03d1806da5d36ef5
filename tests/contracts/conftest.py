"""What every contract may ask for."""

import pytest
from worlds import WORLDS


@pytest.fixture(params=WORLDS.values(), ids=WORLDS.keys())
def world(request):
    """One world after the other."""
    return request.param
