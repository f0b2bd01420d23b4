"""fp4.linear_chain beyond its contract (test_contracts.py): it is its products, one by one; what it refuses."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor  # noqa: F401
from fp4_inductor import errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.ops.linear_chain import ARRIVALS, MOST, ChainCall, Product

fp4, BF16 = torch.ops.fp4, torch.bfloat16
K, HIDDEN, INNER, N, EPS = 64, 48, 80, 96, 1e-5


def part(n, k, scales=1, **options):
    q, s, g = nvfp4.quantize(torch.randn(n, k) / k**0.5)
    return Product(q, s, g * torch.arange(1, scales + 1) if scales > 1 else g, **options)


def layer(rows=1, offset=1.0, act="silu"):
    """The products between two attentions, and what the first one adds."""
    norms = [dict(norm_weight=torch.randn(HIDDEN).to(BF16), eps=EPS, norm_offset=offset) for _ in range(2)]
    residual = torch.randn(rows, HIDDEN).to(BF16)
    bias = torch.randn(N).to(BF16)
    return [
        part(HIDDEN, K, residual=residual),
        part(2 * INNER, HIDDEN, 2, act=act, glu=True, starts=(INNER,), **norms[0]),
        part(HIDDEN, INNER, added=0),
        part(N, HIDDEN, 3, starts=(32, 64), bias=bias, **norms[1]),
    ]


def called(x, products, arrivals=None, **options):
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32) if arrivals is None else arrivals
    return fp4.linear_chain(*ChainCall.made(x, products, arrivals)._replace(**options))


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_the_products_one_by_one(rows):
    x = torch.randn(rows, K).to(BF16)
    o, gate_up, down, qkv = products = layer(rows)
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32)
    got = called(x, products, arrivals)
    h = fp4.linear_epilogue(x, *o[:4], "", None, o.residual)
    g = fp4.norm_linear_glu(h, gate_up.norm_weight, EPS, 1.0, *gate_up[:4], "silu")
    y = fp4.linear_epilogue(g, *down[:4], "", None, h)
    z = fp4.norm_linear(y, qkv.norm_weight, EPS, 1.0, *qkv[:4], "auto", [0, 32, 64])
    assert all(torch.equal(a, b) for a, b in zip(got, (h, g, y, z), strict=True))
    assert not arrivals.any()


def test_some_of_them():
    x = torch.randn(2, 3, HIDDEN).to(BF16)
    _, gate_up, down, _ = layer()
    residual = torch.randn(2, 3, HIDDEN).to(BF16)
    g, y, *rest = called(x, [gate_up, down._replace(added=-1, residual=residual, act="gelu")])
    assert torch.equal(g, fp4.norm_linear_glu(x, gate_up.norm_weight, EPS, 1.0, *gate_up[:4], "silu"))
    assert torch.equal(y, fp4.linear_epilogue(g, *down[:4], "gelu", None, residual))
    assert [t.shape for t in rest] == [(0,)] * (MOST - 2)


def test_products_and_arguments_are_the_same():
    products = layer()
    call = ChainCall.made(torch.randn(1, K), products, torch.zeros(ARRIVALS, dtype=torch.int32))
    again = call.products()
    assert all(all(a is b or a == b for a, b in zip(p, q, strict=True)) for p, q in zip(products, again, strict=True))
    assert call.starts == [0, 0, INNER, 0, 0, 0, 32, 64] and call.glu == [0, 1, 0, 0] and call.act == [0, 1, 0, 0] and call.added == [-1, -1, 0, -1]
    assert again[0].residual is products[0].residual and [p.op for p in again] == ["linear_epilogue", "norm_linear_glu", "linear_epilogue", "norm_linear"]


def test_nan_stays_in_its_row():
    x = torch.randn(3, K).to(BF16)
    products = layer(3)
    clean = called(x, products)
    x[1, 5] = float("nan")
    for dirty, before in zip(called(x, products), clean, strict=True):
        assert dirty[1].isnan().all() and torch.equal(dirty[::2], before[::2])


def test_compiled_on_a_cpu():
    """The lowering of a device without such a kernel: that of each product."""
    x, products, arrivals = torch.randn(1, K).to(BF16), layer(), torch.zeros(ARRIVALS, dtype=torch.int32)
    call = ChainCall.made(x, products, arrivals)
    with torch.no_grad():
        got = torch.compile(lambda *args: fp4.linear_chain(*args), fullgraph=True)(*call)
    for a, b in zip(got, CONTRACTS["linear_chain"].reference(*call), strict=True):
        assert a.shape == b.shape and float((a.double() - b.double()).norm() / b.double().norm()) < 2e-2
    assert not arrivals.any()


REFUSED = {
    "one product": (errors.ShapeError, "2 to 4 products", lambda p: p[:1], {}),
    "five products": (errors.ShapeError, "2 to 4 products", lambda p: [*p, p[-1]], {}),
    "a list that is too short": (errors.ShapeError, "an entry for each", lambda p: p, dict(eps=[0.0])),
    "starts": (errors.ShapeError, "starts of product 1", lambda p: [p[0], p[1]._replace(starts=(16,)), *p[2:]], {}),
    "a later product": (errors.ConfigError, "what product 1 adds", lambda p: [p[0], p[2]._replace(added=1)], {}),
    "two of them": (errors.ConfigError, "what product 2 adds", lambda p: [*p[:2], p[2]._replace(residual=p[0].residual), p[3]], {}),
    "a gate that adds": (errors.ConfigError, "what product 1 adds", lambda p: [p[0], p[1]._replace(added=0), *p[2:]], {}),
    "a gate without activation": (errors.ConfigError, "what product 1 adds", lambda p: p, dict(act=[0, 0, 0, 0])),
    "an activation": (errors.ConfigError, "unknown activation; got 9", lambda p: p, dict(act=[0, 9, 0, 0])),
    "arrivals of another dtype": (errors.DTypeError, "arrivals", lambda p: p, dict(arrivals=torch.zeros(4))),
    "too few arrivals": (errors.ShapeError, f"{ARRIVALS} or more", lambda p: p, dict(arrivals=torch.zeros(ARRIVALS - 1, dtype=torch.int32))),
    "a sum without a group": (errors.ConfigError, "summed over ranks; got summed .0.", lambda p: p, dict(summed=[0])),
    "a group without a sum": (errors.ConfigError, "a group and the numbers", lambda p: p, dict(group="tp")),
    "a sum of gates": (errors.ConfigError, "without activation", lambda p: p, dict(summed=[1], group="tp")),
    "neighbours that are summed": (errors.ConfigError, "no neighbours", lambda p: p, dict(summed=[2, 3], group="tp")),
    "a sum of no product": (errors.ConfigError, "the numbers of at most 2", lambda p: p, dict(summed=[4], group="tp")),
    "sizes that do not fit": (errors.ShapeError, "disagree on K", lambda p: [p[0], p[2]], {}),
    "a residual of another shape": (errors.ShapeError, "residual does not fit", lambda p: [p[0]._replace(residual=torch.zeros(1, 3)), *p[1:]], {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    error, words, change, options = REFUSED[case]
    with pytest.raises(error, match=words):
        called(torch.randn(1, K).to(BF16), change(layer()), **options)


def test_there_is_no_gradient():
    products = layer()
    with pytest.raises(errors.UnsupportedOpError, match="it writes its arguments"):
        called(torch.randn(1, K).to(BF16).requires_grad_(), products)
    norm = products[1].norm_weight.clone().requires_grad_()
    with pytest.raises(errors.UnsupportedOpError, match="it writes its arguments"):
        called(torch.randn(1, K).to(BF16), [products[0], products[1]._replace(norm_weight=norm), *products[2:]])
