"""Graphs per regime of whole models on CUDA (generated, not run): several layers, products of dimensions, ranges, other configs.

One FP4Linear over every M on a CPU, with numbers, is in modules/test_fp4_linear_compile.py; here M decides the kernel.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels.select import Call, plan
from lowering_tests.fake_cuda import NOT_COMPILED, call, code_generation

BF16 = torch.bfloat16
ROWS = (0, 1, 2, 3, 5, 16, 17, 33, 64, 512, 4096)
K = 256


class Block(nn.Module):
    """Layers of different shapes, one with a padded K, one whose N keeps it off the FP8 path."""

    def __init__(self):
        super().__init__()
        options = dict(dtype=BF16, device="cuda")
        self.up = FP4Linear(K, 512, bias=True, **options)
        self.down = FP4Linear(512, K, **options)
        self.padded = FP4Linear(K - 6, 48, **options)
        self.odd = FP4Linear(K, 250, **options)

    def forward(self, x):
        y = x + self.down(nn.functional.silu(self.up(x)))
        return y, self.padded(x.narrow(-1, 0, K - 6)), self.odd(y)


def regimes(shapes=((512, K), (K, 512), (48, K), (250, K)), **fields) -> int:
    """Pieces into which the rows of all layers cut the numbers."""
    plans = [plan(Call("linear", 90, BF16, n, k, csrc=NOT_COMPILED), DispatchConfig(**fields)) for n, k in shapes]
    return 1 + len({bound for p in plans for bound in p.bounds})


def graphs(model, shapes, mark=None, **options) -> list[tuple[int, ...]]:
    """Leading dimensions at which a new graph was compiled."""
    new = []
    with code_generation() as out:
        compiled = torch.compile(model(), fullgraph=True, **options)
        for shape in shapes:
            before = len(out)
            x = torch.empty(*shape, K, dtype=BF16, device="cuda")
            if mark is not None:
                mark(x)
            call(compiled, x)
            if len(out) > before:
                new.append(shape)
    return new


@pytest.mark.parametrize("order", [ROWS, ROWS[::-1]], ids=["up", "down"])
def test_a_block_of_layers_shares_its_regimes(order):
    found = graphs(Block, [(m,) for m in (*order, *order)], dynamic=True)
    assert len(found) <= regimes() + 2, found


def test_automatic_dynamic_costs_one_static_graph_at_most():
    found = graphs(Block, [(m,) for m in (33, 64, 2, 4096, 1, 3, 0, 700, 33)])
    assert len(found) <= regimes() + 2 + 1, found


def test_batch_times_length():
    """Regimes of the product; torch makes 0 and 1 of each dimension a case of its own."""
    shapes = [(2, 2), (2, 3), (7, 5), (5, 7), (64, 4), (4, 64), (2, 1024), (64, 64), (3, 2), (33, 33), (4, 2)]
    found = graphs(lambda: FP4Linear(K, 512, dtype=BF16, device="cuda"), shapes, dynamic=True)
    assert len(found) <= regimes(((512, K),)), found


@pytest.mark.parametrize("bounds", [(2, 4), (5, 256), (257, 8192)])
def test_a_marked_range_inside_a_regime_takes_one_graph_and_no_guard(bounds, monkeypatch):
    from fp4_inductor.lowerings import linear as lowering

    def refuse(symbols, m, bound):
        raise AssertionError(f"guard on {m} <= {bound}")

    monkeypatch.setattr(lowering.inductor.Symbols, "guard_at_most", refuse)
    low, high = bounds
    with dispatch(thresholds={"gemv": 4, "small": 0, "mid": 256}):
        found = graphs(Block, [(low,), (high,), ((low + high) // 2,), (low + 1,)], mark=lambda x: dynamo.mark_dynamic(x, 0, min=low, max=high))
    assert found == [(low,)]


def test_torch_check_is_a_range_too(monkeypatch):
    from fp4_inductor.lowerings import linear as lowering

    monkeypatch.setattr(lowering.inductor.Symbols, "guard_at_most", lambda *a: pytest.fail("guarded"))

    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = FP4Linear(K, 512, dtype=BF16, device="cuda")

        def forward(self, x):
            torch._check(x.shape[0] <= 200)
            torch._check(x.shape[0] > 8)
            return self.linear(x)

    with dispatch(thresholds={"gemv": 4, "small": 0, "mid": 256}):
        assert graphs(Checked, [(9,), (200,), (64,)], dynamic=True) == [(9,)]


def test_a_range_over_two_regimes_takes_two_graphs():
    with dispatch(thresholds={"gemv": 4, "small": 0, "mid": 256}):
        found = graphs(Block, [(m,) for m in (100, 300, 256, 257, 5)], dynamic=True)
    assert found == [(100,), (300,)]


def test_another_dispatch_config():
    """As with torch's own configs: a graph in memory keeps the one it was compiled under; a new compilation takes the new one."""
    with code_generation() as out:
        compiled = torch.compile(FP4Linear(K, 512, dtype=BF16, device="cuda"), fullgraph=True)
        x = torch.empty(64, K, dtype=BF16, device="cuda")
        call(compiled, x)
        assert "triton_tem" in out[0]
        first = len(out)
        with dispatch(thresholds={"gemv": 0, "mid": 0}):
            call(compiled, x)
            assert len(out) == first
            torch.compiler.reset()
            call(compiled, x)
            assert "_scaled_mm" in out[first]
