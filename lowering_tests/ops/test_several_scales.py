"""One result of several layers with a global scale each: bits of the layers alone, float64, gradients, refusals, the fused ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import CONTRACTS, sparse_linear

fp4 = torch.ops.fp4
ROWS, N, K = [0, 32, 40, 41], 57, 96
DENSE, SPARSE = "linear", "sparse_linear"
TOLERANCE = CONTRACTS["linear"].tolerance


def weight(op: str, count: int = 4):
    """``(parts, global scales, rows, dense float64 [N, K])``; the scales differ by powers of seven."""
    *packed, g = nvfp4.quantize(torch.randn(N, K)) if op == DENSE else sparse_linear.random_weight((N, K), torch.device("cpu"))
    g = g * 7.0 ** torch.arange(count)
    rows, of_row = ROWS[:count], torch.zeros(N, dtype=torch.int64)
    for begin in rows[1:]:
        of_row[begin:] += 1
    decode = fp4.dequantize if op == DENSE else fp4.sparse_dequantize
    return packed, g, rows, decode(*packed, torch.ones(()), torch.float32).double() * g.double()[of_row][:, None]


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize("op", [DENSE, SPARSE])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(("lead", "dtype"), [((1,), torch.bfloat16), ((2, 3), torch.float32), ((9,), torch.float16), ((40,), torch.bfloat16)])
def test_one_result_is_the_layers_side_by_side(op, count, lead, dtype):
    packed, g, rows, exact = weight(op, count)
    x, bias = torch.randn(*lead, K).to(dtype), torch.randn(N).to(dtype)
    y = getattr(fp4, op)(x, *packed, g, bias, "auto", rows)
    alone = [getattr(fp4, op)(x, *(p[a:b] for p in packed), g[i], bias[a:b]) for i, (a, b) in enumerate(zip(rows, [*rows[1:], N], strict=True))]
    assert torch.equal(y, torch.cat(alone, -1))
    assert relative(y - bias, x.double() @ exact.T) < 4 * TOLERANCE[dtype]  # the bias is rounded with the sum


def test_a_strided_global_scale():
    packed, g, rows, _ = weight(DENSE, 3)
    apart = torch.stack((g, g * 2), 1)[:, 0]
    assert not apart.is_contiguous()
    x = torch.randn(3, K)
    assert torch.equal(fp4.linear(x, *packed, apart, None, "auto", rows), fp4.linear(x, *packed, g, None, "auto", rows))


@pytest.mark.parametrize("op", [DENSE, SPARSE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(op, dtype):
    packed, g, rows, exact = weight(op)
    x, bias = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((2, 5, K), (N,)))
    y = getattr(fp4, op)(x, *packed, g, bias, "auto", rows)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert relative(x.grad, upstream.double() @ exact) < (1e-6 if dtype == torch.float32 else 2e-2)
    assert relative(bias.grad, upstream.double().sum((0, 1))) < (1e-6 if dtype == torch.float32 else 2e-2)
    with pytest.raises(errors.UnsupportedOpError, match="global_scale"):
        getattr(fp4, op)(x, *packed, g.clone().requires_grad_(), None, "auto", rows)


@pytest.mark.parametrize("op", [DENSE, SPARSE])
def test_gradients_of_a_compiled_call(op):
    packed, g, rows, exact = weight(op, 3)
    g, exact = g / 500, exact / 500

    @torch.compile
    def f(x):
        return getattr(fp4, op)(x, *packed, g, None, "auto", rows).sin()

    x = torch.randn(4, K, requires_grad=True)
    f(x).sum().backward()
    want = x.detach().double().requires_grad_()
    (want @ exact.T).sin().sum().backward()
    assert relative(x.grad, want.grad) < 1e-5


@pytest.mark.parametrize("m", [3, 80])
def test_rounded_activations(m):
    """``prefill="nvfp4"``: many rows are rounded once for all layers."""
    packed, g, rows, exact = weight(DENSE, 3)
    x = torch.randn(m, K)
    y = fp4.linear(x, *packed, g, None, "nvfp4", rows)
    alone = [fp4.linear(x, *(p[a:b] for p in packed), g[i], None, "nvfp4") for i, (a, b) in enumerate(zip(rows, [*rows[1:], N], strict=True))]
    assert torch.equal(y, torch.cat(alone, -1))
    assert (relative(y, x.double() @ exact.T) > 1e-3) == (m > 64)


def test_epilogue():
    packed, g, rows, exact = weight(DENSE, 3)
    x, bias, mul, residual = torch.randn(5, K), torch.randn(N), torch.randn(5, N), torch.randn(5, N)
    y = fp4.linear_epilogue(x, *packed, g / 50, bias, "silu", mul, residual, "auto", rows)
    assert relative(y, F.silu(x.double() @ exact.T / 50 + bias) * mul + residual) < 1e-5


@pytest.mark.parametrize("m", [1, 12])
def test_glu_takes_one_product(m):
    """Two scales of a GLU are one call of fp4.linear: the bits of both layers alone."""
    q, s, g = nvfp4.quantize(torch.randn(48, K))
    scales, x, bias = g * torch.tensor([1.0, 5.0]), torch.randn(m, K).bfloat16(), torch.randn(48).bfloat16()
    gate, up = (fp4.linear(x, q[a : a + 24], s[a : a + 24], scales[i], bias[a : a + 24]) for i, a in enumerate((0, 24)))
    assert torch.equal(fp4.linear_glu(x, q, s, scales, bias), F.silu(gate) * up)
    assert fp4.linear_glu(x, q[:0], s[:0], scales).shape == (m, 0)


def test_one_member_is_one_scale():
    packed, g, _, _ = weight(DENSE)
    x = torch.randn(3, K)
    assert torch.equal(fp4.linear(x, *packed, g[:1], None, "auto", [0]), fp4.linear(x, *packed, g[0]))
    assert torch.equal(fp4.linear(x, *packed, g[0], None, "auto", []), fp4.linear(x, *packed, g[0]))


def test_a_packed_layer_is_the_call():
    codes, scale, _ = nvfp4.quantize(torch.randn(N, K))
    packed = fp4_inductor.pack_linear(codes, scale, torch.tensor([3.0, 4.0, 8.0]), output_sizes=(32, 8, 17), divides=True)
    assert packed.rows == [0, 32, 40]
    y = fp4.linear(torch.eye(K), *packed.weight, None, "auto", packed.rows)
    assert torch.equal(y[:, 40:], nvfp4.dequantize(codes[40:], scale[40:], torch.tensor(0.125), torch.float32).T)


Q, S, G = nvfp4.quantize(torch.ones(8, 32))
X = torch.ones(3, 32)
BAD = {
    "rows without their scales": (torch.ones(()), [0, 4]),
    "more rows than scales": (torch.ones(2), [0, 2, 4]),
    "scales without rows": (torch.ones(2), None),
    "the first not at 0": (torch.ones(2), [1, 4]),
    "not ascending": (torch.ones(3), [0, 4, 4]),
    "behind the weight": (torch.ones(2), [0, 8]),
    "scales in two dimensions": (torch.ones(2, 1), [0, 4]),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("fake", [False, True])
def test_bad_rows_are_typed(case, fake):
    g, rows = BAD[case]
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad(), pytest.raises(errors.ShapeError, match=r"global_scale.*accepted: "):
        fp4.linear(X, Q, S, g, None, "auto", rows)


def test_a_rounded_scale_is_refused():
    with pytest.raises(errors.DTypeError, match=r"bfloat16"):
        fp4.linear(X, Q, S, torch.ones(2, dtype=torch.bfloat16), None, "auto", [0, 4])
