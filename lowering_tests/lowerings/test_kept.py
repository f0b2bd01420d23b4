"""Zeros that a compiled graph keeps from call to call: its own, in each process that loads it from a cache."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.virtualized import V

from fp4_inductor import _engines, cache_salt
from fp4_inductor._torch import kept


def test_they_are_stored_as_their_length():
    """Equal graphs are equal bytes, whatever was counted when they were stored, and each load has zeros of its own."""
    one, other = (kept.zeros_on("cpu", 4) for _ in range(2))
    assert one.dtype == torch.int32 and one.data_ptr() != other.data_ptr()
    one += 3
    stored = pickle.dumps({"counters": one})
    assert stored == pickle.dumps({"counters": other}) and pickle.loads(stored)["counters"].eq(0).all()
    loaded = [pickle.loads(stored)["counters"] for _ in range(2)]
    assert len({t.data_ptr() for t in loaded}) == 2 and pickle.dumps({"counters": loaded[0]}) == stored


@pytest.mark.parametrize(
    ("graph", "reason"), [(dict(aot_mode=True), "ahead-of-time compilation"), (dict(cpp_wrapper=True), "a C++ wrapper"), ({}, "")], ids=["aot", "cpp", "kept"]
)
def test_which_graphs_keep_them(graph, reason):
    with V.set_graph_handler(SimpleNamespace(**dict(aot_mode=False, cpp_wrapper=False) | graph)):
        assert kept.why_not().startswith(reason) and bool(kept.why_not()) == bool(reason)


def test_keys_know_who_compiles():
    """A graph with a constant that its calls share is not found by who calls it on two streams."""
    before = cache_salt()
    remove = _engines.add_provider(lambda: True)
    try:
        assert cache_salt() != before
    finally:
        remove()
    assert cache_salt() == before
