"""fp4.sparse_linear and its siblings beyond test_contracts.py: float64 on every pattern, refusals, what other rows see."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor import errors
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.ops import CONTRACTS, sparse_linear

fp4 = torch.ops.fp4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = CONTRACTS["sparse_linear"].tolerance
N, K = 40, 160


def weight(kind, device="cpu", n=N, k=K) -> sparse24.Sparse24Parts:
    """``kind``: a pattern's index for every group, ``"mixed"``, or ``"adversarial"`` (each neighbour another one). All codes and scales."""
    nibbles = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)
    index = {"mixed": torch.randint(0, 6, (n, k // 4)), "adversarial": (torch.arange(k // 4) + torch.arange(n)[:, None]) % 6}.get(kind)
    index = torch.full((n, k // 4), kind) if index is None else index
    scale = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    parts = torch.randint(0, 256, (n, k // 4), dtype=torch.uint8), sparse24.pack_meta(nibbles[index]), scale, torch.tensor(0.37)
    return sparse24.Sparse24Parts(*(t.to(device) for t in parts))


def exact(x, parts):
    return x.double() @ sparse24.dequantize_sparse24(*parts, torch.float32).double().mT


def error(y, want) -> float:
    return float((y.double() - want).norm() / want.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*range(6), "mixed", "adversarial"])
@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
def test_every_pattern_against_float64(kind, dtype, device):
    parts = weight(kind, device)
    for m in (1, 2, 8, 9, 33):
        # positions of a group differ by powers of four: a swapped pair shows
        x = ((torch.randn(m, K) / 64) * 4.0 ** (torch.arange(K) % 4)).to(device=device, dtype=dtype)
        bias = torch.randn(N, device=device).to(dtype)
        assert error(fp4.sparse_linear(x, *parts), exact(x, parts)) <= 2 * TOLERANCE[dtype], m
        assert error(fp4.sparse_linear(x, *parts, bias), exact(x, parts) + bias.double()) <= 2 * TOLERANCE[dtype], m


@pytest.mark.parametrize("device", DEVICES)
def test_exact_ops_equal_their_reference(device):
    for name in ("sparse_dequantize", "sparse_dequantize_fp8", "sparse_decompress", "sparse_quantize"):
        contract = CONTRACTS[name]
        for description, args in contract.inputs(torch.device(device)):
            got, want = contract.op(*args), contract.reference(*args)
            for a, b in zip((got,) if isinstance(got, torch.Tensor) else got, (want,) if isinstance(want, torch.Tensor) else want, strict=True):
                assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), (name, description)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
def test_dequantize_every_byte_and_pattern(dtype, device):
    values = torch.arange(256, dtype=torch.uint8).repeat(36, 1)
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)
    meta = (nibble[:, None] | nibble[None, :] << 4).reshape(36, 1).expand(36, 128).contiguous()
    scale = torch.arange(36 * 64).remainder(127).to(torch.uint8).view(36, 64).view(nvfp4.SCALE_DTYPE)
    parts = tuple(t.to(device) for t in (values, meta, scale, torch.tensor(1.7)))
    got, want = fp4.sparse_dequantize(*parts, dtype), sparse24.dequantize_sparse24(*parts, dtype)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    dense = fp4.sparse_decompress(*parts[:2])
    assert torch.equal(fp4.dequantize(dense, *parts[2:], dtype), got)


def test_gradients():
    parts = sparse_linear.random_weight((N, K), torch.device("cpu"))
    x, b = torch.randn(2, 5, K, requires_grad=True), torch.randn(N, requires_grad=True)
    got = torch.autograd.grad(fp4.sparse_linear(x, *parts, b).square().sum(), (x, b))
    w = sparse24.dequantize_sparse24(*parts, torch.float32)
    want = torch.autograd.grad(torch.nn.functional.linear(x, w, b).square().sum(), (x, b))
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    v, m, s, g = parts
    for call in (
        lambda g: fp4.sparse_linear(x, v, m, s, g),
        lambda g: fp4.sparse_dequantize(v, m, s, g, torch.float32),
        lambda g: fp4.sparse_quantize(w * g, sparse24.magnitude_mask(w)),
    ):
        with pytest.raises(errors.UnsupportedOpError, match="has no gradient for"):
            call(g.clone().requires_grad_())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [1, 5, 9, 40])
def test_rows_do_not_see_each_other(m, device):
    """A non-finite activation stays in its row, and reaches the outputs that keep it; an output that dropped it may be finite."""
    parts = weight("mixed", device)
    kept = sparse24.mask_of(parts.meta)[:, 79].cpu()
    x = torch.randn(m, K, device=device)
    clean = fp4.sparse_linear(x, *parts)
    for bad in (float("nan"), float("inf")):
        dirty = x.clone()
        dirty[m // 2, 79] = bad
        y = fp4.sparse_linear(dirty, *parts)
        others = torch.arange(m) != m // 2
        assert torch.equal(y[others], clean[others])
        assert not y[m // 2].cpu()[kept].isfinite().any()


def test_batch_invariance_of_few_rows_on_a_cpu():
    from fp4_inductor.kernels.linear import cpu_native

    if not cpu_native.status()[0]:
        pytest.skip("ATen's GEMM is not batch-invariant")
    parts, x = weight("mixed"), torch.randn(8, K)
    alone = torch.cat([fp4.sparse_linear(row[None], *parts) for row in x])
    for m in range(1, 9):
        assert torch.equal(fp4.sparse_linear(x[:m], *parts), alone[:m])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("m", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 5])
@pytest.mark.parametrize("k", [0, 32])
def test_empty_dimensions_have_a_result(m, n, k, device):
    parts = sparse_linear.random_weight((n, k), torch.device(device))
    x, bias = torch.randn(m, k, device=device), torch.randn(n, device=device)
    assert fp4.sparse_dequantize(*parts, torch.float32).shape == (n, k)
    torch.testing.assert_close(
        fp4.sparse_linear(x, *parts, bias), torch.nn.functional.linear(x, fp4.sparse_dequantize(*parts, torch.float32), bias), rtol=1e-5, atol=1e-5
    )


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0x00, 0x40, 0x45, 0xFF, 0xA4, 0x4B])
def test_a_cpu_refuses_illegal_metadata(byte):
    parts = weight("mixed")
    parts.meta[N - 1, K // 8 - 1] = byte
    for m in (1, 8, 20):
        with pytest.raises(errors.SparsityError, match=f"0x{byte:02X} at "):
            fp4.sparse_linear(torch.randn(m, K), *parts)
    with pytest.raises(errors.SparsityError, match="1 of 800 bytes"):
        fp4.sparse_dequantize(*parts, torch.bfloat16)


@pytest.mark.gpu
def test_illegal_metadata_on_a_gpu_stays_inside_its_operands():
    parts = weight("mixed")
    parts.meta.copy_(torch.randint(0, 256, parts.meta.shape, dtype=torch.uint8))
    parts = sparse24.Sparse24Parts(*(t.cuda() for t in parts))
    for m in (1, 8, 33, 600):
        fp4.sparse_linear(torch.randn(m, K, device="cuda", dtype=torch.bfloat16), *parts)
    torch.cuda.synchronize()


P = sparse24.quantize_sparse24(torch.tensor([1.0, 0, 2, 0]).repeat(8, 8))
P3 = sparse24.Sparse24Parts(*(t[None] for t in P))
X = torch.ones(3, 32)
MASK = sparse24.magnitude_mask(X)
REFUSED = {
    "K": (errors.ShapeError, r"\(3, 64\).*32", lambda: fp4.sparse_linear(torch.ones(3, 64), *P)),
    "3-D weight": (errors.ShapeError, r"values \[N, K/4\].*fp4.bmm", lambda: fp4.sparse_linear(X, *P3)),
    "dtype": (errors.DTypeError, r"float64", lambda: fp4.sparse_linear(X.double(), *P)),
    "bias shape": (errors.ShapeError, r"\(1,\).*\(8,\)", lambda: fp4.sparse_linear(X, *P, torch.ones(1))),
    "bias dtype": (errors.DTypeError, r"bfloat16", lambda: fp4.sparse_linear(X, *P, torch.ones(8).bfloat16())),
    "prefill": (errors.ConfigError, r"'fp4'", lambda: fp4.sparse_linear(X, *P, None, "fp4")),
    "device": (errors.DeviceError, r"cpu.*meta", lambda: fp4.sparse_linear(X.to("meta"), *P)),
    "meta device": (errors.DeviceError, r"meta meta", lambda: fp4.sparse_linear(X, P[0], P[1].to("meta"), *P[2:])),
    "meta shape": (errors.ShapeError, r"meta \(7, 4\)", lambda: fp4.sparse_linear(X, P[0], P[1][1:], *P[2:])),
    "dense codes": (errors.ShapeError, r"values \(8, 16\)", lambda: fp4.sparse_linear(X, P[0].repeat(1, 2), *P[1:])),
    "K of half a word": (errors.ShapeError, r"K % 32 == 0", lambda: fp4.sparse_decompress(P[0][:, :4], P[1][:, :2])),
    "dequantize dtype": (errors.DTypeError, r"float64", lambda: fp4.sparse_dequantize(*P, torch.float64)),
    "dequantize_fp8 3-D": (errors.ShapeError, r"one matrix", lambda: fp4.sparse_dequantize_fp8(*P3[:3])),
    "quantize K": (errors.ShapeError, r"multiple of 32", lambda: fp4.sparse_quantize(torch.ones(3, 48))),
    "quantize mask shape": (errors.ShapeError, r"another shape", lambda: fp4.sparse_quantize(X, MASK[:2])),
    "quantize mask dtype": (errors.DTypeError, r"bool", lambda: fp4.sparse_quantize(X, MASK.float())),
    "quantize search": (errors.ConfigError, r"'best'", lambda: fp4.sparse_quantize(X, MASK, "best")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    error_class, message, call = REFUSED[case]
    with pytest.raises(error_class, match=message):
        call()
    if "device" not in case:  # a graph that could not run is not traced either
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error_class, match=message):
            call()


def test_what_only_values_show():
    with pytest.raises(errors.SparsityError, match="exactly 2"):
        fp4.sparse_quantize(X, torch.ones_like(MASK))
    with pytest.raises(errors.SparsityError, match="row 0, k 0..3 with 4 non-zeros"):
        fp4.sparse_quantize(X)
    given = torch.tensor(0.5)
    assert fp4.sparse_quantize(X, MASK, "amax", given)[3].data_ptr() != given.data_ptr()
