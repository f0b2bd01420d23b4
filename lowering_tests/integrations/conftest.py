"""Quiet transformers, and its tiny models."""

from __future__ import annotations

import pytest

from lowering_tests.models.conftest import build


@pytest.fixture(autouse=True)
def _quiet():
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def tiny():
    """``tiny("llama", dtype)``: a tiny model."""
    return build
