"""Which kernel a graph of symbolic M takes where nobody checks guards: an H100's rows (generated, not run), compile ranges, and who drops guards.

What the graphs do at a call is in test_held_rows.py.
"""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch._dynamo as dynamo
import torch._inductor
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp4_inductor
from fp4_inductor import FP4Linear, compile_range
from fp4_inductor._torch import guards
from lowering_tests import fake_cuda
from lowering_tests.fake_cuda import call, code_generation

BF16 = torch.bfloat16
K, N = 256, 512
# The rows of this shape on an H100 with compiled CUDA sources: GEMV 1, table to 32, wide to 128, FP8 to 8192.
BOUNDS = [1, 32, 128, 8192]
KERNELS = ["cuda_gemv", "cuda_table", "cuda_wide", "cuda_wide_fp8", "dequantize_fp8 + scaled_mm"]
DROP = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
NO_BENCHMARK = {"config_patches": {"triton.autotune_at_compile_time": False}}


def layer() -> FP4Linear:
    return FP4Linear(K, N, dtype=BF16, device="cuda")


def rows(size: int) -> torch.Tensor:
    return torch.empty(size, K, dtype=BF16, device="cuda")


def lowered(m: int = 300, given=None, mark=None, build=layer, shape=(), **options) -> list:
    """What was decided while ``build()`` was compiled for ``[m, *shape, K]`` with a dynamic m."""
    fp4_inductor.decisions(clear=True)
    with code_generation(csrc=""), given or contextlib.nullcontext():
        x = torch.empty(m, *shape, K, dtype=BF16, device="cuda")
        if mark is not None:
            mark(x)
        call(torch.compile(build(), fullgraph=True, **({} if mark else {"dynamic": True}), **options), x)
    return [(r.decision, r.kernel, r.note.split(": NOT")[0].partition("; cuda")[0]) for r in fp4_inductor.decisions().rows]


def test_the_rows_of_this_file():
    assert fp4_inductor.bounds([(N, K)], device="sm_90") == BOUNDS


@pytest.mark.parametrize("i", range(len(KERNELS)))
def test_a_range_proves_the_regime_whatever_the_example_is(i):
    """vLLM traces once with the largest number of tokens and compiles that graph for each range."""
    low, high = ([0, *BOUNDS][i] + 1, [*BOUNDS, None][i])
    with compile_range(low, high):
        found = lowered(options=dict(DROP))
    assert found == [("proven", KERNELS[i], found[0][2])]
    assert f"compile_range({low}, {high})" in found[0][2]


def test_one_token_by_a_range():
    """Torch takes 2 for the least value of a dynamic size: M > 1 was "proven" in a graph that was then run with one token."""
    assert lowered(given=compile_range(1, 1), options=dict(DROP))[0][:2] == ("proven", "cuda_gemv")
    assert lowered(given=compile_range(1, 32), options=dict(DROP))[0][:2] == ("runtime", "by M")
    assert lowered(given=compile_range(2, 32), options=dict(DROP))[0][:2] == ("proven", "cuda_table")


def test_a_range_of_less_than_twice_its_least_has_one_kernel():
    """25 to 48 rows: a kernel that serves 25 to 32 would be chosen at run time, without what may be fused into it."""
    ((how, kernel, note),) = lowered(given=compile_range(25, 48), options=dict(DROP))
    assert (how, kernel) == ("proven", "cuda_wide")
    assert note.rpartition("; ")[2] == "compile_range(25, 48): one kernel for the whole range, of cuda_table, cuda_wide"
    assert lowered(given=compile_range(24, 48), options=dict(DROP))[0][:2] == ("runtime", "by M")


def test_a_range_of_several_regimes_is_never_guarded_where_guards_are_dropped():
    ((how, _, note),) = lowered(given=compile_range(1, 16), options=dict(DROP))
    assert how == "runtime"
    assert "skip_all_guards_unsafe drops the guards on sizes" in note
    assert "compile_range(1, 16) spans several regimes" in note


def test_a_range_of_several_regimes_is_guarded_where_dynamo_checks():
    assert lowered(given=compile_range(25, 512))[0][:2] == ("guard", "cuda_wide_fp8")
    assert lowered(given=compile_range(129, 512))[0][:2] == ("proven", "cuda_wide_fp8")


def test_m_is_what_the_only_size_makes_it():
    """[B, 8, K]: M is 8 B."""

    def batch(x):
        dynamo.mark_dynamic(x, 0)

    assert lowered(shape=(8,), mark=batch, given=compile_range(4, 16), options=dict(DROP))[0][:2] == ("runtime", "by M")
    assert lowered(shape=(8,), mark=batch, given=compile_range(5, 16), options=dict(DROP))[0][:2] == ("proven", "cuda_wide")


def test_a_range_is_not_for_a_graph_with_two_sizes():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = layer()

        def forward(self, x):
            return self.linear(x)

    def both(x):
        dynamo.mark_dynamic(x, 0)
        dynamo.mark_dynamic(x, 1)

    ((how, _, note),) = lowered(m=5, shape=(7,), build=Two, mark=both, given=compile_range(1, 1), options=dict(DROP))
    assert how == "runtime"
    assert "compile_range(1, 1) is for graphs with one dynamic size" in note


@pytest.mark.parametrize("name", [n for n in torch.compiler.__all__ if n.endswith("_unsafe")])
def test_what_is_said_of_a_filter_is_what_dynamo_does_with_it(name):
    keep = getattr(torch.compiler, name)
    compiled, traced = [], []

    def backend(gm, inputs):
        compiled.append(gm)
        traced.append(guards.why_unchecked(TracingContext.get().fake_mode.shape_env))
        return gm.forward

    def by_size(x):
        return x + 1 if x.shape[0] > 128 else x - 1

    def quiet(entries):  # Dynamo calls it after us: what it returns for the guards on sizes is its own
        return keep(entries)

    f = torch.compile(by_size, backend=backend, dynamic=True, options={"guard_filter_fn": quiet})
    x = torch.zeros(300, 2)
    f(x)
    f(torch.zeros(4, 2))
    assert bool(traced[0]) == (len(compiled) == 1), (traced, len(compiled))


def drops_a_type(entries):
    return [e.guard_type != "TENSOR_MATCH" for e in entries]


def expects_tensors(entries):
    return [e.value.dim() == 2 for e in entries]


def test_filters_of_users():
    assert lowered(options={"guard_filter_fn": drops_a_type})[0][:2] == ("guard", "cuda_wide_fp8")
    assert guards._why_filtered(drops_a_type) == guards._why_filtered(None) == ""
    assert "expects_tensors drops the guards on sizes" in guards._why_filtered(expects_tensors), "what it does is not known: not relied on"


def test_dropped_guards_leave_the_op_to_decide():
    ((how, kernel, note),) = lowered(options=dict(DROP))
    assert (how, kernel) == ("runtime", "by M")
    assert note == "guard_filter_fn=skip_all_guards_unsafe drops the guards on sizes"


def test_a_guard_of_somebody_else_proves_nothing_where_it_is_dropped():
    """The first decision of a graph narrowed the range that the others read: all later ones were "proven", for the example's M."""

    class Branch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = layer()

        def forward(self, x):
            return self.linear(x) if x.shape[0] > 200 else x

    assert lowered(build=Branch)[0][:2] == ("guard", "cuda_wide_fp8")
    assert lowered(build=Branch, options=dict(DROP))[0][:2] == ("runtime", "by M")


def test_a_range_of_mark_dynamic_is_a_promise():
    def within(low, high):
        return lambda x: dynamo.mark_dynamic(x, 0, min=low, max=high)

    assert lowered(mark=within(129, 512), options=dict(DROP))[0][:2] == ("proven", "cuda_wide_fp8")
    assert lowered(m=20, mark=within(2, 32), options=dict(DROP))[0][:2] == ("proven", "cuda_table")
    assert lowered(m=20, mark=within(1, 32), options=dict(DROP))[0][0] == "runtime", "1 is in it"
    assert lowered(m=20, mark=within(1, 32))[0][0] == "proven", "Dynamo keeps a graph for 1"


def test_static_shapes_are_proven():
    assert lowered(mark=dynamo.mark_static, options=dict(DROP))[0][:2] == ("proven", "cuda_wide_fp8")


def test_a_setting_under_which_cached_graphs_are_taken_without_their_guards():
    with torch._inductor.config.patch(unsafe_skip_cache_dynamic_shape_guards=True):
        ((how, _, note),) = lowered()
    assert how == "runtime"
    assert "unsafe_skip_cache_dynamic_shape_guards" in note


def captured(x, **options):
    """The graph that Dynamo makes of a layer, as vLLM keeps it, and its fake inputs."""
    kept = []

    def backend(gm, inputs):
        kept.append(gm)
        return gm.forward

    torch.compile(layer(), backend=backend, dynamic=True, fullgraph=True, **options)(x)
    return kept[0], [node.meta["example_value"] for node in kept[0].graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize("options", [{}, {"options": DROP}], ids=["guards kept", "guards dropped"])
def test_a_graph_that_is_compiled_after_dynamo(options):
    """vLLM's piecewise compilation: one trace, one compilation for each range. Dynamo's guards are complete by then, or were dropped."""
    fp4_inductor.decisions(clear=True)
    with code_generation(csrc=""):
        graph, inputs = captured(rows(300), **{k: dict(v) for k, v in options.items()})
        for given in (contextlib.nullcontext(), compile_range(1, 1), compile_range(2, 32), compile_range(33, 128), compile_range(1, 128)):
            with given:
                torch._inductor.standalone_compile(graph, inputs, dynamic_shapes="from_graph", options=NO_BENCHMARK)
    found = fp4_inductor.decisions().rows
    assert [(r.decision, r.kernel) for r in found] == [
        ("runtime", "by M"), ("proven", "cuda_gemv"), ("proven", "cuda_table"), ("proven", "cuda_wide"), ("runtime", "by M"),
    ]  # fmt: skip
    assert guards.NOT_DYNAMO in found[0].note


@pytest.mark.parametrize("compiler", ["standalone_compile", "compile"])
def test_a_backend_that_compiles_while_dynamo_does_keeps_its_guards(compiler):
    def backend(gm, inputs):
        if compiler == "compile":
            return torch._inductor.compile(gm, inputs)
        fakes = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
        return torch._inductor.standalone_compile(gm, fakes, dynamic_shapes="from_graph", options=NO_BENCHMARK)

    assert lowered(backend=backend)[0][:2] == ("guard", "cuda_wide_fp8")
    assert lowered(backend=backend, options=dict(DROP))[0][:2] == ("runtime", "by M")


def test_who_checks_what():
    """In the compilation, in another thread, for other sizes, and after it (a backward is compiled then)."""
    found = {}

    def backend(gm, inputs):
        shape_env = TracingContext.get().fake_mode.shape_env
        found["before"] = guards._answers.get(shape_env, guards.NOT_DYNAMO)
        found["inside"] = guards.why_unchecked(shape_env), guards.why_no_more(shape_env), guards.are_checked()
        found["other sizes"] = guards.why_unchecked(ShapeEnv())
        thread = threading.Thread(target=lambda: found.update({"thread": (guards.why_unchecked(shape_env), guards.why_no_more(shape_env))}))
        thread.start()
        thread.join()
        found["env"] = shape_env
        return gm.forward

    torch.compile(lambda x: x + x.shape[0], backend=backend, dynamic=True)(torch.zeros(3))
    assert found["before"] == found["other sizes"] == guards.NOT_DYNAMO
    assert found["inside"] == ("", "", True)
    assert found["thread"] == ("", guards.NOT_DYNAMO)
    assert guards.why_unchecked(found["env"]) == ""
    assert "complete" in guards.why_no_more(found["env"])
    assert not guards.are_checked(), "nothing is being compiled"


def test_explain_compiles_with_the_filter_of_the_model():
    with code_generation(csrc=""):
        model = torch.compile(layer(), dynamic=True, options=dict(DROP))
        with contextlib.suppress(fake_cuda._Generated):
            fp4_inductor.explain(model, rows(300))
    assert [r.decision for r in fp4_inductor.decisions().rows][-1:] == ["runtime"]


def test_the_tile_and_the_fusions_follow_the_range_not_the_example():
    """The example is vLLM's largest batch; M = 25 to 32 takes a tile for 32 rows and leaves a residual to what reads it."""
    from fp4_inductor._torch.symbols import likely, size_of_graph

    seen = {}

    def backend(gm, inputs):
        for node in gm.graph.find_nodes(op="placeholder"):
            node.meta["val"] = size = node.meta["example_value"]
        size = size.shape[0]
        assert size_of_graph(gm.graph) == size.node.expr
        seen["all"] = likely(size, 0, gm.graph, None)
        seen["few"] = likely(size * 2, 0, gm.graph, (25, 32))
        seen["many"] = likely(size, 0, gm.graph, (512, None))
        return gm.forward

    x = torch.zeros(300, 7)
    dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x: x + 1, backend=backend)(x)
    assert seen == {"all": 300, "few": 64, "many": 512}
