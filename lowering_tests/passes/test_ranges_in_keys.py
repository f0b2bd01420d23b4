"""Torch's compile caches keep graphs of different ranges, dispatch configs and threads apart, and guarded ones from those whose guards nobody checks."""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import pytest
import torch
import torch._inductor.compile_fx
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import autograd_cache

from fp4_inductor import FP4Linear, add_range_provider, compile_range, decisions, dispatch, set_dispatch
from fp4_inductor.errors import RowsError
from lowering_tests.lowerings.test_held_rows import right, three_regimes, x  # noqa: F401  (a fixture)

DROP = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
CACHED = {"fx_graph_cache": True}


@pytest.fixture
def cached():
    with torch._inductor.utils.fresh_cache(), torch._inductor.config.patch(CACHED), torch._functorch.config.patch(enable_autograd_cache=True), torch.no_grad():
        yield


@pytest.fixture
def graph(cached):
    """``compile()`` of one graph that Dynamo made once, as vLLM compiles it for each of its ranges: what the caches said, and the compiled graph."""
    layer = FP4Linear.from_weight(torch.randn(32, 64).bfloat16())
    kept = []

    def keep(gm, inputs):
        kept.append(gm)
        return gm.forward

    torch.compile(layer, backend=keep, dynamic=True, fullgraph=True)(x(300))
    fakes = [node.meta["example_value"] for node in kept[0].graph.find_nodes(op="placeholder")]

    def compile_(given=None):
        counters.clear()
        with given or contextlib.nullcontext():
            torch._inductor.standalone_compile(kept[0], fakes, dynamic_shapes="from_graph")
        return answer()

    return compile_


def answer() -> str:
    """What the caches said since ``counters.clear()``."""
    i, a = counters["inductor"], counters["aot_autograd"]
    assert i["fxgraph_cache_bypass"] + a["autograd_cache_bypass"] == 0
    misses, hits = i["fxgraph_cache_miss"] + a["autograd_cache_miss"], i["fxgraph_cache_hit"] + a["autograd_cache_hit"]
    assert (misses > 0) != (hits > 0), (misses, hits)
    return "miss" if misses else "hit"


def test_ranges_are_kept_apart(graph):
    assert [graph(compile_range(*r)) for r in ((1, 1), (2, 24), (2, 32), (25, 32))] == ["miss"] * 4
    assert graph() == "miss"
    assert [graph(compile_range(*r)) for r in ((1, 1), (2, 24), (2, 32))] + [graph()] == ["hit"] * 4


def test_a_provider_is_as_good(graph):
    given = []
    remove = add_range_provider(lambda: given[-1])
    try:
        for expected, r in (("miss", (1, 16)), ("miss", (17, 512)), ("hit", (1, 16)), ("miss", None)):
            given.append(r)
            assert graph() == expected, r
    finally:
        remove()
    assert graph(compile_range(17, 512)) == "hit"


@pytest.mark.parametrize("passes", ["run", "left out"])
def test_the_key_by_which_vllm_takes_one_artifact_for_another(graph, passes):
    """vLLM reuses what it has in memory if torch's AOTAutograd key is equal. With torch 2.11 it leaves the passes before AOTAutograd out, where
    the tag would be salted anew."""
    keys = []
    key = autograd_cache.autograd_cache_key

    def seen(*args, **kwargs):
        keys.append(key(*args, **kwargs))
        return keys[-1]

    left_out = mock.patch.object(torch._inductor.compile_fx, "_recursive_pre_grad_passes", lambda gm, inputs: gm)
    with mock.patch.object(autograd_cache, "autograd_cache_key", seen), left_out if passes == "left out" else contextlib.nullcontext():
        for given in (compile_range(1, 16), compile_range(17, 512), dispatch(unproven="runtime"), compile_range(1, 16), None):
            graph(given)
    first, second, third, again, fifth = (k[0] for k in keys)
    assert first == again
    assert len({first, second, third, fifth}) == 4


def test_threads_with_configs_of_their_own(graph):
    """From torch 2.13 on the tag is a thread's own, and unsalted in a new thread; before, it is everybody's."""

    def in_a_thread(**fields):
        said = []

        def compile_there():
            with dispatch(**fields), torch.no_grad(), torch._inductor.config.patch(CACHED), torch._functorch.config.patch(enable_autograd_cache=True):
                said.append(graph())

        thread = threading.Thread(target=compile_there)
        thread.start()
        thread.join()
        return said[0]

    assert in_a_thread(early="never") == "miss"
    assert in_a_thread(unproven="runtime") == "miss"
    assert in_a_thread(early="never") == "hit"
    before = set_dispatch(candidates=("triton_gemv_glu",))
    try:
        assert in_a_thread() == "miss"
        assert in_a_thread() == "hit"
    finally:
        set_dispatch(before)


def test_guarded_graphs_are_no_others(cached):
    layer = FP4Linear.from_weight(torch.randn(32, 64).bfloat16())

    def compile_(**options):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(layer, dynamic=True, **options)(x(300))
        return answer()

    assert [compile_(), compile_(options=dict(DROP)), compile_(), compile_(options=dict(DROP))] == ["miss", "miss", "hit", "hit"]


def test_a_graph_from_the_cache_serves_the_range_that_it_was_compiled_for(three_regimes, cached):  # noqa: F811
    """The whole way, twice, in one cache: the second time nothing is lowered."""
    for lowered in (4, 0):
        decisions(clear=True)
        for given, inside, outside in (
            (compile_range(1, 1), (1,), 300),
            (compile_range(2, 16), (2, 16), 1),
            (compile_range(17, 512), (17, 300), 4),
            (None, (1, 4), None),
        ):
            torch._dynamo.reset()
            compiled = torch.compile(three_regimes, dynamic=True, options=dict(DROP))
            with given or contextlib.nullcontext(), contextlib.suppress(RowsError):
                compiled(x(300))  # as vLLM traces with its largest batch
            right(three_regimes, compiled, *inside)
            if outside is not None:
                with pytest.raises(RowsError, match=f"M = {outside};"):
                    compiled(x(outside))
        assert len(decisions().rows) == lowered
