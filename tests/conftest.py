"""What every test may ask for."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with `mnist/` and `text/`."""
    folder = os.environ.get("MANYHANDS_DATA")
    if not folder:
        pytest.skip("MANYHANDS_DATA is not set: it must name a folder with mnist/ and text/")
    return Path(folder)
