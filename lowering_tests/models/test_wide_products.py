"""Products of 16-bit numbers on a CPU without instructions for them: computed in float32, rounded once, backward passes too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fp4_inductor._torch import wide_products
from fp4_inductor.models.calibrate import evaluating

HALVES = (torch.bfloat16, torch.float16)


class Seen(TorchDispatchMode):
    """The (operator, dtype) of every product that reaches the CPU."""

    def __init__(self):
        super().__init__()
        self.products: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op._opname in ("mm", "addmm", "bmm", "baddbmm"):
            self.products.append((op._opname, args[-1].dtype))
        return op(*args, **(kwargs or {}))


@pytest.fixture
def unserved(monkeypatch):
    """This CPU has no 16-bit products, whatever it has."""
    monkeypatch.setattr(wide_products, "serves", lambda dtype: dtype not in HALVES)


def active() -> int:
    return sum(isinstance(mode, wide_products._WideProducts) for mode in _get_current_dispatch_mode_stack())


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_float32_rounded_once(unserved, dtype):
    a, b, bias = torch.randn(3, 40, 64).to(dtype), torch.randn(3, 64, 24).to(dtype), torch.randn(24).to(dtype)
    with wide_products.wide_products([a]):
        got = [a[0] @ b[0], torch.addmm(bias, a[0], b[0]), torch.bmm(a, b), torch.baddbmm(bias.expand(3, 40, 24), a, b, beta=2, alpha=0.5)]
    x, y, z = a.float(), b.float(), bias.float()
    want = [x[0] @ y[0], torch.addmm(z, x[0], y[0]), torch.bmm(x, y), torch.baddbmm(z.expand(3, 40, 24), x, y, beta=2, alpha=0.5)]
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, other.to(dtype), rtol=0, atol=0)


def test_gradients_are_too(unserved):
    layer, x = nn.Linear(64, 32, dtype=torch.bfloat16), torch.randn(40, 64, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(40, 32, dtype=torch.bfloat16)
    with Seen() as seen, wide_products.wide_products([x]):
        layer(x).backward(g)
    assert {dtype for _, dtype in seen.products} == {torch.float32}
    assert len(seen.products) == 3
    torch.testing.assert_close(x.grad, (g.float() @ layer.weight.float()).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(layer.weight.grad, (g.float().T @ x.float()).bfloat16(), rtol=0, atol=0)


def test_attention_has_gradients_as_good_as_before(unserved):
    parts = [torch.randn(2, 4, 48, 32, dtype=torch.bfloat16) for _ in range(3)]
    g = torch.randn(2, 4, 48, 32, dtype=torch.bfloat16)

    def gradients(dtype):
        q, k, v = leaves = [p.to(dtype, copy=True).requires_grad_() for p in parts]
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(g.to(dtype))
        return [leaf.grad.double() for leaf in leaves]

    exact, before = gradients(torch.float64), gradients(torch.bfloat16)
    with wide_products.wide_products(parts):
        after = gradients(torch.bfloat16)
    for right, old, new in zip(exact, before, after, strict=True):
        assert 0 < (new - right).norm() <= 1.05 * (old - right).norm()


@pytest.mark.parametrize("shapes", [((8, 64), (64, 32)), ((40, 8), (8, 32)), ((40, 64), (64, 8))])
def test_small_products_stay(unserved, shapes):
    a, b = (torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)
    with Seen() as seen, wide_products.wide_products([a]):
        a @ b
    assert seen.products == [("mm", torch.bfloat16)]


def test_nothing_happens_where_the_cpu_has_them(monkeypatch):
    monkeypatch.setattr(wide_products, "serves", lambda dtype: True)
    with wide_products.wide_products([torch.ones(1, dtype=dtype) for dtype in HALVES]):
        assert active() == 0


def test_one_kind_may_be_served(monkeypatch):
    monkeypatch.setattr(wide_products, "serves", lambda dtype: dtype != torch.float16)
    with Seen() as seen, wide_products.wide_products([torch.ones(1, dtype=torch.float16)]):
        for dtype in HALVES:
            torch.ones(32, 32, dtype=dtype) @ torch.ones(32, 32, dtype=dtype)
    assert seen.products == [("mm", torch.bfloat16), ("mm", torch.float32)]


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 0)])
def test_a_model_that_is_evaluated(unserved, dtype, count):
    model = nn.Linear(32, 32, dtype=dtype)
    with evaluating(model):
        assert active() == count
        with evaluating(model):
            assert active() == count
        assert active() == count
    assert active() == 0


@pytest.mark.parametrize(
    ("machine", "onednn", "expected"),
    [("aarch64", True, [True, True]), ("x86_64", False, [False, False]), ("AMD64", True, [True, False])],
    ids=["arm", "no oneDNN", "x86"],
)
def test_what_is_known_of_a_cpu(monkeypatch, machine, onednn, expected):
    monkeypatch.setattr(wide_products.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: onednn)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    asked = wide_products.serves.__wrapped__
    assert [asked(dtype) for dtype in HALVES] == expected
    assert asked(torch.float32)
