"""Codecs are tested with the compiled kernels and without them."""

import pytest

from manyhands.codecs import native


@pytest.fixture(params=["c", "torch"])
def with_or_without_kernels(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "compiled", lambda *_: None)
    elif not native.loaded():
        pytest.skip("the kernels are not compiled here")
