"""A graph compiled for one regime of M and called with an M of another, its guards dropped: it runs the right kernel, or says so.

Graphs for an H100 are generated here and run as far as their first kernel; graphs for a CPU, given three regimes, are run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo as dynamo
import torch._inductor.compile_fx
from expecttest import assert_expected_inline
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, Sparse24Linear, compile_range, dispatch
from fp4_inductor.errors import RowsError
from fp4_inductor.lowerings import linear as lowering
from lowering_tests.executed import run
from lowering_tests.fake_cuda import call_body, generated_code, held

BF16 = torch.bfloat16
K, N = 256, 512
DROP = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}


def layer(kind=FP4Linear, **options):
    return lambda: kind(K, N, dtype=BF16, device="cuda", **options)


def code_of(build=None, m: int = 300, **options) -> str:
    return generated_code(build or layer(), [((m, K), BF16)], csrc="", dynamic=True, **options)[0]


def arguments(m: int) -> list:
    """Of the wrapper of one layer: the size, then tensors in the order in which the operator takes them."""
    layer = FP4Linear.from_weight(torch.randn(N, K).to(BF16))
    return [m, torch.randn(m, K).to(BF16), *layer.parts()]


def test_the_check_in_generated_code():
    first = code_of().split("def call(self, args):")[1].split("async_compile")[0]
    lines = [line.strip() for line in first.splitlines()]
    at = next(i for i, line in enumerate(lines) if "8192" in line)
    text = "\n".join(lines[at : at + 4]).replace(lines[at].split()[1], "s0")
    assert_expected_inline(
        text,
        """\
if s0 < 129 or s0 > 8192:
import fp4_inductor.errors
raise fp4_inductor.errors.RowsError.outside(s0, 129, 8192, 'cuda_wide_fp8 of fp4.linear, N = 512, K = 256')
buf0 = None""",
    )
    assert not any("empty_strided" in line or ".run(" in line for line in lines[:at]), "it stands in front of all that is computed"


@pytest.mark.parametrize(
    ("m", "conditions"),
    [(3, "s0 < 2 or s0 > 32"), (100, "s0 < 33 or s0 > 128"), (9000, "s0 < 8193")],
)
def test_each_regime_is_held(m, conditions):
    ((condition, error),) = held(code_of(m=m))
    assert condition == conditions
    assert error.startswith("s0, ")


def test_kernels_of_every_kind_are_held():
    with dispatch(thresholds={"gemv": 4, "small": 0, "mid": 64, "wide": 0, "wide_fp8": 0}):
        assert held(code_of(m=3))[0][0] == "s0 < 2 or s0 > 4", "a Triton template"
        assert held(code_of(m=100))[0][0] == "s0 < 65", "plain operations around a transient weight"
    assert held(code_of(layer(Sparse24Linear), m=100))[0][0] == "s0 < 17 or s0 > 256"


def test_one_check_a_graph_of_the_narrowest_bounds():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = FP4Linear(K, 2048, dtype=BF16, device="cuda"), FP4Linear(2048, K - 6, dtype=BF16, device="cuda")

        def forward(self, x):
            return self.down(torch.sigmoid(self.up(x)).cumsum(-1).to(BF16))

    ((condition, _),) = held(code_of(Block, m=20))
    assert condition == "s0 < 2 or s0 > 32"
    with dispatch(thresholds={"mid": 40}):
        wide = held(code_of(Block, m=35))
    assert wide[0][0] == "s0 < 33 or s0 > 128"
    assert "K = 256" in wide[0][1] or "K = 2048" in wide[0][1]


def test_nothing_is_checked_that_needs_no_check():
    assert held(generated_code(layer(), [((300, K), BF16)], csrc="", dynamic=False)[0]) == [], "M is a number"
    assert held(code_of(options=dict(DROP))) == [], "the operator decides"
    assert held(code_of(mark=lambda x: dynamo.decorators.mark_unbacked(x, 0))) == []


@pytest.mark.parametrize("m", [4, 24, 8193])
def test_an_h100_graph_for_many_rows_says_that_it_is_called_with_few(m):
    code = code_of()
    with pytest.raises(RowsError, match=rf"cuda_wide_fp8 of fp4.linear, N = 512, K = 256.*got M = {m}; accepted: M = 129 to 8192. .*set_dispatch"):
        run(code, arguments(m))


@pytest.mark.parametrize("m", [1, 4, 300])
def test_an_h100_graph_whose_guards_are_known_to_be_dropped_leaves_it_to_the_operator(m):
    code = code_of(options=dict(DROP))
    assert_expected_inline(
        call_body(code),
        """\
    b0 = torch.ops.fp4.linear.default(in0, in1, in2, in3, None, 'auto')
return (b0, )""",
    )
    args = arguments(m)
    (y,), _ = run(code, args)
    assert torch.equal(y, torch.ops.fp4.linear(*args[1:]))


def test_a_promise_that_is_broken_is_named():
    with compile_range(2, 32):
        code = code_of(options=dict(DROP))
    for m in (1, 33):
        with pytest.raises(RowsError, match=rf"cuda_table.*got M = {m}; accepted: M = 2 to 32"):
            run(code, arguments(m))


# --- a CPU with three regimes ------------------------------------------------------------------------------------


@pytest.fixture
def three_regimes(monkeypatch):
    """The CPU's kernel as three ranges, for M = 1, up to 16, and above; nothing of it gets into a cache."""
    real = lowering.plan

    def plan(call, config):
        found = real(call, config)
        row = found.rows[-1]
        rows = (*(replace(row, max_m=m, implementation=replace(row.implementation, regime=regime)) for regime, m in (("gemv", 1), ("mid", 16))), row)
        return replace(found, rows=rows, call=replace(found.call, arch=90))

    monkeypatch.setattr(lowering, "plan", plan)
    with torch._inductor.utils.fresh_cache(), torch.no_grad():
        yield FP4Linear.from_weight(torch.randn(32, 64).to(BF16), torch.randn(32).to(BF16))


def x(m: int) -> torch.Tensor:
    return torch.randn(m, 64).to(BF16)


def right(model, compiled, *ms: int) -> None:
    for m in ms:
        a = x(m)
        assert torch.equal(compiled(a), model(a)), m


def refused(compiled, *ms: int) -> None:
    for m in ms:
        with pytest.raises(RowsError, match=f"M = {m}"):
            compiled(x(m))


def test_guards(three_regimes):
    compiled = torch.compile(three_regimes, dynamic=True)
    right(three_regimes, compiled, 300, 4, 1, 17, 16)


def test_dropped_guards(three_regimes):
    fp4_inductor.decisions(clear=True)
    compiled = torch.compile(three_regimes, dynamic=True, options=dict(DROP))
    right(three_regimes, compiled, 300, 4, 1, 17)
    assert [r.decision for r in fp4_inductor.decisions().rows] == ["runtime"], "one graph"


def test_a_range(three_regimes):
    with compile_range(17, 512):
        compiled = torch.compile(three_regimes, dynamic=True, options=dict(DROP))
        right(three_regimes, compiled, 300)
    right(three_regimes, compiled, 17, 4096)
    refused(compiled, 4, 1)


def test_one_token_in_a_range_graph(three_regimes):
    with compile_range(1, 1):
        compiled = torch.compile(three_regimes, dynamic=True, options=dict(DROP))
        refused(compiled, 300)
    right(three_regimes, compiled, 1)
    refused(compiled, 2)


def test_guards_that_are_switched_off_after_the_compilation(three_regimes):
    a = x(300)
    dynamo.mark_dynamic(a, 0)
    with torch._dynamo.config.patch(enable_aot_compile=True):
        ahead = torch.compile(three_regimes.forward, fullgraph=True).aot_compile(((a,), {}))
    right(three_regimes, lambda a: ahead(three_regimes, a), 300)
    with pytest.raises(RuntimeError, match="GuardManager check failed"):
        ahead(three_regimes, x(4))
    ahead.disable_guard_check()
    right(three_regimes, lambda a: ahead(three_regimes, a), 300, 17)
    refused(lambda a: ahead(three_regimes, a), 4, 1)


def test_a_compiler_that_keeps_the_graph_and_forgets_the_guards(three_regimes):
    kept, given = [], []

    def backend(gm, inputs):
        kept.append(torch._inductor.compile_fx.compile_fx(gm, inputs))
        given.extend(inputs)
        return kept[0]

    first = x(300)
    torch.compile(three_regimes, backend=backend, dynamic=True)(first)

    def later(a):
        return kept[0](*[a.shape[0] if not isinstance(i, torch.Tensor) else a if i.shape == first.shape else i for i in given])[0]

    right(three_regimes, later, 300, 17)
    refused(later, 4, 1)


@pytest.mark.parametrize(("low", "high", "example"), [(17, 512, 300), pytest.param(1, 16, 12, marks=pytest.mark.slow)])
def test_ahead_of_time_the_cpp_wrapper_checks(three_regimes, tmp_path, capfd, low, high, example):
    exported = torch.export.export(three_regimes, (x(example),), dynamic_shapes=({0: torch.export.Dim("m", min=low, max=high)},))
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    served, others = ((12, 4, 1, 16), (17,)) if low == 1 else ((300, 17), (16, 1))
    right(three_regimes, loaded, *served)
    for m in others:
        capfd.readouterr()
        with pytest.raises(RuntimeError) as error:
            loaded(x(m))
        said = str(error.value) + capfd.readouterr().err  # torch 2.11 writes what was thrown to stderr and raises its own words
        assert f"was called with M = {m}" in said
