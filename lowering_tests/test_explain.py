"""explain(): what it says of eager and compiled models on a CPU, and of code generated for CUDA."""

from __future__ import annotations

import functools
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import CppBuilder

from fp4_inductor import FP4Linear, NVFP4Tensor, dispatch, explain
from fp4_inductor._torch import capture
from fp4_inductor.errors import ConfigError, FP4Error
from fp4_inductor.explain import Explanation
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.linear import cpu_native
from lowering_tests.fake_cuda import call, code_generation

BF16 = torch.bfloat16


class MLP(nn.Module):
    def __init__(self, hidden, inner, dtype):
        super().__init__()
        make = lambda k, n, bias: FP4Linear(k, n, bias=bias, dtype=dtype, device="cuda")  # noqa: E731
        self.gate, self.up, self.down = make(hidden, inner, True), make(hidden, inner, False), make(inner, hidden, False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    """On fake CUDA tensors."""

    def __init__(self, hidden=1024, inner=2048, dtype=BF16):
        super().__init__()
        self.layers = nn.ModuleList(MLP(hidden, inner, dtype) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Chain(nn.Module):
    """On a CPU; nothing but quantized calls, which spares the C++ compiler."""

    def __init__(self):
        super().__init__()
        self.first = FP4Linear.from_weight(torch.randn(128, 64), torch.randn(128))
        self.rest = nn.Sequential(FP4Linear.from_weight(torch.randn(64, 128)), FP4Linear.from_weight(torch.randn(64, 64)))

    def forward(self, x):
        return self.rest(self.first(x))


NAMES = ["first", "rest.0", "rest.1"]
CUDA_NAMES = [f"layers.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")]


def test_eager_on_a_cpu():
    found = explain(Chain(), torch.randn(3, 64))
    assert [r.module for r in found.rows] == NAMES
    first = found.rows[0]
    assert (first.op, first.m, first.n, first.k, first.dtype) == ("fp4.linear", "3", 128, 64, "float32")
    assert (first.regime, first.kernel, first.decision, first.epilogue) == ("cpu", "cpu", "runtime", ())
    native, text = cpu_native.status()
    assert text in first.note
    assert first.note.startswith("C kernels" if native else "ATen path")


def test_an_eager_call_is_described_as_one(monkeypatch):
    """On a GPU it may have another kernel than in a compiled graph."""
    module, asked = sys.modules[Explanation.__module__], []
    describe = module.describe
    monkeypatch.setattr(module, "describe", lambda *args, eager=False: asked.append(eager) or describe(*args, eager=eager))
    explain(Chain(), torch.randn(3, 64))
    assert asked == [True] * 3


def test_compiled_on_a_cpu():
    model = Chain()
    compiled = torch.compile(model, dynamic=True)
    x = torch.randn(3, 64)
    want = compiled(x)
    found = explain(compiled, x)
    assert [r.module for r in found.rows] == NAMES
    assert {(r.op, r.regime, r.kernel, r.decision) for r in found.rows} == {("fp4.linear", "cpu", "cpu", "proven")}
    assert [(r.n, r.k) for r in found.rows] == [(128, 64), (64, 128), (64, 64)]
    assert all(r.m.startswith("s") for r in found.rows), "dynamic=True: M is a symbol"
    counters.clear()
    assert torch.equal(compiled(x), want)
    assert counters["stats"]["unique_graphs"] == 0, "explain must leave the compiled model's own graphs alone"


class Merged(nn.Module):
    """A weight of several layers, without a module of this package."""

    def __init__(self, count):
        super().__init__()
        q, s, g = nvfp4.quantize(torch.randn(64, 64))
        self.rows = [16 * i for i in range(count)]
        for name, t in (("q", q), ("s", s), ("g", g * 2.0 ** torch.arange(count))):
            self.register_buffer(name, t)

    def forward(self, x):
        return torch.ops.fp4.linear(x, self.q, self.s, self.g, None, "auto", self.rows)


@pytest.mark.parametrize("count", [2, 4])
def test_several_global_scales_are_told(count):
    model, x = Merged(count), torch.randn(3, 64)
    for asked in (model, torch.compile(model)):
        (row,) = explain(asked, x).rows
        assert (row.op, row.m, row.n, row.k) == ("fp4.linear", "3", 64, 64)
        assert f"{count} global scales" in row.note


def test_compiled_with_a_static_shape_shows_the_number():
    assert {r.m for r in explain(torch.compile(Chain()), torch.randn(3, 64)).rows} == {"3"}


def test_attention_is_told_with_its_sizes():
    operands = [torch.randn(2, heads, length, 64) for heads, length in ((8, 1), (2, 20), (2, 20))]
    found = explain(torch.ops.fp4.decode_attention, *operands)
    (row,) = found.rows
    assert (row.op, row.m, row.n, row.k, row.kernel, row.regime) == ("fp4.decode_attention", "4", 8, 64, "sdpa", "library")
    assert "M is queries times heads that share a KV head" in " ".join(str(found).split())


def test_kernels_that_are_built_are_not_built_again():
    first = Chain().first
    compiled = torch.compile(lambda x: first(x) * x.sum())
    x = torch.randn(3, 64)
    y = compiled(x)
    with mock.patch.object(CppBuilder, "build", side_effect=AssertionError("a compiler runs")):
        (row,) = explain(compiled, x).rows
    assert (row.m, row.n, row.k) == ("3", 128, 64)
    assert torch.equal(compiled(x), y)


def test_a_tensor_subclass_and_a_function():
    w = NVFP4Tensor.from_dense(torch.randn(32, 64))

    def f(x, flat=False):
        return nn.functional.linear(x.flatten(0, 1) if flat else x, w)

    for g in (f, torch.compile(f)):
        (row,) = explain(g, torch.randn(2, 5, 64), flat=True).rows
        assert (row.op, row.m, row.n, row.k) == ("fp4.linear", "10", 32, 64)


def test_matches_of_the_passes_are_told():
    w = NVFP4Tensor.from_dense(torch.randn(32, 64))

    def f(x):
        return x @ torch.ops.fp4.dequantize(w.qdata, w.scale, w.global_scale, torch.float32).t()

    found = explain(torch.compile(f), torch.randn(3, 64))
    assert len(found.rows) == 1
    assert sum(found.matches.values()) == 1
    assert "patterns: " in str(found)


def test_nothing_quantized():
    found = explain(nn.Linear(4, 4), torch.randn(1, 4))
    assert found.rows == []
    assert str(found) == "explain: no quantized call was reached."


def test_what_depends_on_the_batch():
    model = Chain()
    x = torch.randn(3, 64)
    for explained in (explain(model, x), explain(torch.compile(model), x)):
        assert {r.batch for r in explained.rows if r.kernel == "cpu"} == {"up to 8 rows are summed in another order than more"}


def test_not_a_model():
    with pytest.raises(ConfigError, match="str"):
        explain("model")
    assert issubclass(ConfigError, FP4Error)


def test_the_modules_own_error_is_raised_and_hooks_are_gone():
    model = Chain()
    with pytest.raises(FP4Error, match="K"):
        explain(model, torch.randn(3, 60))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class Decorated(Chain):
    """Its forward is called through a function that has the model among its ``args``, as Transformers 5.24 renames arguments."""

    forward = functools.wraps(Chain.forward)(lambda *args, **kwargs: Chain.forward(*args, **kwargs))


def test_modules_behind_a_decorated_forward_have_their_names():
    x = torch.randn(3, 64)
    wanted = [row.module for row in explain(torch.compile(Chain()), x).rows]
    assert wanted and all(wanted) and [row.module for row in explain(torch.compile(Decorated()), x).rows] == wanted


# --- code generated for CUDA -------------------------------------------------------------------------------------


def explain_cuda(build, shape, dtype=BF16, mark=None, cc=(9, 0), **options) -> Explanation:
    """explain() on fake CUDA tensors: the compiled model is not run, everything before is."""
    with code_generation(cc):
        x = torch.empty(shape, dtype=dtype, device="cuda")
        if mark:
            mark(x)
        compiled = torch.compile(build(), fullgraph=True, **options)
        again = capture.compile_again

        def not_run(model, args, kwargs, fused):
            call(lambda: again(model, args, kwargs, fused))

        with mock.patch.object(capture, "compile_again", not_run):
            return explain(compiled, x)


def test_cuda_epilogues_and_module_names():
    with dispatch(thresholds={"gemv": 4, "small": 0, "mid": 256}):
        found = explain_cuda(Net, (40, 1024), mark=lambda x: torch._dynamo.mark_dynamic(x, 0))
    assert [r.module for r in found.rows] == CUDA_NAMES
    assert {(r.decision, r.dtype) for r in found.rows} == {("guard", "bfloat16")}
    assert all(r.m.startswith("s") for r in found.rows)
    by_name = {r.module.removeprefix("layers.1."): r for r in found.rows[3:]}
    # silu * up ends in whichever of the two is scheduled last; the other fuses its own half
    fused = by_name["gate"].epilogue + by_name["up"].epilogue
    assert "mul" in fused
    assert {"sigmoid", "silu", "exp"} & set(fused), fused
    assert set(by_name["down"].epilogue) == {"add"}
    assert "guard" in str(found)


def test_cuda_proven_and_runtime():
    mark = lambda x: torch._dynamo.mark_dynamic(x, 0, min=2, max=4)  # noqa: E731
    with dispatch(thresholds={"gemv": 4, "small": 0, "mid": 256}):
        assert {(r.regime, r.decision) for r in explain_cuda(Net, (3, 1024), mark=mark).rows} == {("gemv", "proven")}
        assert {(r.regime, r.decision) for r in explain_cuda(Net, (4096, 1024)).rows} == {("large_fp8", "proven")}
    with dispatch(unproven="runtime"):
        rows = explain_cuda(Net, (40, 1024), dynamic=True).rows
    assert {(r.regime, r.kernel, r.decision) for r in rows} == {("any", "by M", "runtime")}
    assert "unproven" in rows[0].note
    assert {r.epilogue for r in rows} == {()}


def test_cuda_refused_rows_say_why_and_only_of_this_architecture():
    (row, *_) = explain_cuda(lambda: Net(dtype=torch.float16), (4096, 1024), torch.float16).rows
    refused = dict(row.refused)
    assert row.regime == "large_dense"
    assert any("float16" in reason for kernel, reason in refused.items() if "scaled_mm" in kernel)
    assert not any("sm_" in reason for reason in refused.values())
    with dispatch(thresholds={"gemv": 0}):
        (row, *_) = explain_cuda(Net, (1, 1024)).rows
    assert ("switched off by DispatchConfig.thresholds") in {reason for _, reason in row.refused}
    gemv = {kernel.name for kernel in registry.kernels() if kernel.regime == "gemv"}
    assert row.kernel not in gemv
    assert gemv & {kernel for kernel, _ in row.refused}


def test_rows_that_nobody_asked_for_are_no_news():
    for row in explain(Chain(), torch.randn(3, 64)).rows:
        assert row.refused == ()
    asked = FP4Linear.from_weight(torch.randn(64, 64), prefill="nvfp4")
    (row,) = explain(asked, torch.randn(100, 64)).rows
    assert row.regime == "large_nvfp4"
    (row, *_) = explain_cuda(lambda: Net(dtype=BF16), (4096, 1024)).rows
    assert not any("w4a4" in kernel for kernel, _ in row.refused)
