"""Codecs are tested with the compiled kernels and without them."""

import pytest

from manyhands.codecs import vector_kernels


@pytest.fixture(params=["c", "torch"])
def with_or_without_kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(vector_kernels, "compiled", lambda *_: None)
    elif not vector_kernels.loaded():
        pytest.skip("the kernels are not compiled here")
