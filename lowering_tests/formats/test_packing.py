"""Raw tensors of a checkpoint to arguments of the ops: values, sharing, copies, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.formats.reciprocal import divided, is_exact, multiplied, reciprocal_scale

SIZES = (48, 16, 32)


def parts(n: int = 96, k: int = 64, lead: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    return nvfp4.quantize(torch.randn(*lead, n, k))[:2]


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


def test_scales_apart_keep_their_rows():
    codes, scale = parts()
    g = torch.tensor([0.5, 0.25, 2.0])
    packed = fp4_inductor.pack_linear(codes, scale, g, output_sizes=SIZES)
    assert packed.rows == [0, 48, 64] and torch.equal(packed.global_scale, g)
    assert packed.codes.data_ptr() == codes.data_ptr() and packed.scale.data_ptr() == scale.data_ptr()  # nothing is copied
    x = torch.randn(3, 64)
    dense = [nvfp4.dequantize(q, s, w, torch.float32).double() for q, s, w in zip(codes.split(SIZES), scale.split(SIZES), g, strict=True)]
    assert relative(torch.ops.fp4.linear(x, *packed.weight, None, "auto", packed.rows), x.double() @ torch.cat(dense).T) < 2e-6


@pytest.mark.parametrize("g", [torch.tensor(0.5), torch.tensor([0.5]), torch.full((3,), 0.5)], ids=["[]", "[1]", "equal"])
def test_one_scale_where_one_does(g):
    codes, scale = parts()
    packed = fp4_inductor.pack_linear(codes, scale, g, output_sizes=SIZES if g.numel() == 3 else None)
    assert packed.global_scale.shape == () and packed.rows is None and float(packed.global_scale) == 0.5


@pytest.mark.parametrize(
    ("g", "rows"),
    [((1.0, 1.0, 1.0, 2.0), [0, 72]), ((1.0, 2.0, 3.0, 4.0), [0, 24, 48, 72]), ((1.0, 2.0, 2.0, 1.0), [0, 24, 72]), ((1.0, 2.0, 2.0), [0, 24, 48])],
)
def test_equal_neighbours_are_merged_only_where_one_kernel_would_not_take_them(g, rows):
    codes, scale = parts()
    sizes = [24] * (len(g) - 1) + [96 - 24 * (len(g) - 1)]
    packed = fp4_inductor.pack_linear(codes, scale, torch.tensor(g), output_sizes=sizes)
    assert packed.rows == rows
    of_row = torch.tensor(g).repeat_interleave(torch.tensor(sizes))
    assert all(torch.equal(of_row[a:b], w.expand(b - a)) for w, a, b in zip(packed.global_scale, rows, [*rows[1:], 96], strict=True))


def test_bytes_and_packed_dtypes_are_views():
    codes, scale = parts()
    packed = fp4_inductor.pack_linear(codes.view(torch.float4_e2m1fn_x2), scale.view(torch.uint8), torch.tensor(1.0))
    assert packed.codes.dtype == torch.uint8 and packed.codes.data_ptr() == codes.data_ptr()
    assert packed.scale.dtype == torch.float8_e4m3fn and packed.scale.data_ptr() == scale.data_ptr()
    strided = fp4_inductor.pack_linear(codes[::2], scale[::2], torch.tensor(1.0))
    assert strided.codes.is_contiguous() and torch.equal(strided.codes, codes[::2])


def test_parameters_are_taken_and_stay_as_they_are():
    codes, scale = (torch.nn.Parameter(t, requires_grad=False) for t in parts())
    g = torch.nn.Parameter(torch.tensor([4.0, 8.0, 16.0]), requires_grad=False)
    packed = fp4_inductor.pack_linear(codes, scale, g, output_sizes=SIZES, divides=True)
    assert g.tolist() == [4.0, 8.0, 16.0] and packed.global_scale.tolist() == [0.25, 0.125, 0.0625]
    assert not any(isinstance(t, torch.nn.Parameter) or t.requires_grad for t in packed.weight)


def test_sparse_parts():
    w = torch.randn(96, 64)
    values, meta, scale, _ = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    packed = fp4_inductor.pack_linear(values, scale, torch.tensor([1.0, 2.0, 3.0]), output_sizes=SIZES, meta=meta)
    assert [t.data_ptr() for t in packed.weight[:3]] == [values.data_ptr(), meta.data_ptr(), scale.data_ptr()]
    y = torch.ops.fp4.sparse_linear(torch.eye(64), *packed.weight, None, "auto", packed.rows)
    of_row = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(torch.tensor(SIZES))
    assert relative(y, (sparse24.dequantize_sparse24(values, meta, scale, torch.tensor(1.0), torch.float32).double() * of_row[:, None]).T) < 2e-6


@pytest.mark.parametrize(("shape", "kept"), [((4,), (4,)), ((4, 1), (4,)), ((4, 1, 1), (4,)), ((4, 2), (4, 2))])
def test_experts(shape, kept):
    codes, scale = parts(lead=(4,))
    g = torch.rand(shape) + 0.5
    packed = fp4_inductor.pack_experts(codes, scale, g)
    assert packed.global_scale.shape == kept and packed.global_scale.is_contiguous() and packed.codes.data_ptr() == codes.data_ptr()
    assert torch.equal(packed.global_scale.reshape(shape), g)


def test_experts_whose_gates_and_ups_agree_have_one_scale():
    codes, scale = parts(lead=(4,))
    g = torch.rand(4, 1).expand(4, 2).contiguous() + 0.5
    assert torch.equal(fp4_inductor.pack_experts(codes, scale, g, divides=True).global_scale, reciprocal_scale(g[:, 0]))
    g[3, 1] *= 2
    assert fp4_inductor.pack_experts(codes, scale, g).global_scale.shape == (4, 2)


def _spoiled(codes, scale, byte):
    scale = scale.clone()
    scale.view(torch.uint8).view(-1)[5] = byte
    return codes, scale


CODES, SCALE = nvfp4.quantize(torch.ones(96, 64))[:2]
STACK, STACK_SCALE = nvfp4.quantize(torch.ones(4, 96, 64))[:2]
ONE, FOUR = torch.ones(()), torch.ones(4)
linear, experts = fp4_inductor.pack_linear, fp4_inductor.pack_experts
REFUSED = {
    "a scale that was rounded": (errors.DTypeError, r"qkv: .*bfloat16.*float32.*default dtype", lambda: linear(CODES, SCALE, ONE.bfloat16(), name="qkv")),
    "experts' scales rounded": (errors.DTypeError, "bfloat16", lambda: experts(STACK, STACK_SCALE, FOUR.bfloat16())),
    "codes of another dtype": (errors.DTypeError, "weight: .*qdata.*int8", lambda: linear(CODES.view(torch.int8), SCALE, ONE)),
    "sizes missing": (errors.ShapeError, r"global_scale \(3,\), output_sizes None, 96 rows", lambda: linear(CODES, SCALE, torch.ones(3))),
    "sizes of other rows": (errors.ShapeError, r"\[48, 16, 16\]", lambda: linear(CODES, SCALE, torch.ones(3), output_sizes=(48, 16, 16))),
    "too few scales": (errors.ShapeError, r"\(2,\)", lambda: linear(CODES, SCALE, torch.ones(2), output_sizes=SIZES)),
    "a layer without rows": (errors.ShapeError, r"\[96, 0\]", lambda: linear(CODES, SCALE, torch.ones(2), output_sizes=(96, 0))),
    "scales in two dimensions": (errors.ShapeError, r"\(1, 1\)", lambda: linear(CODES, SCALE, torch.ones(1, 1))),
    "swizzled scales": (errors.ShapeError, "scale", lambda: linear(CODES, SCALE.reshape(-1), ONE)),
    "a stack as a matrix": (errors.ShapeError, r"\[N, K/2\].*pack_experts", lambda: linear(STACK, STACK_SCALE, FOUR)),
    "a matrix as a stack": (errors.ShapeError, r"\[E, N, K/2\].*pack_linear", lambda: experts(CODES, SCALE, ONE)),
    "three scales an expert": (errors.ShapeError, r"\(4, 3\)", lambda: experts(STACK, STACK_SCALE, torch.ones(4, 3))),
    "halves of an odd number": (errors.ShapeError, r"\(4, 2\), 4 experts of 95 rows", lambda: experts(STACK[:, :95], STACK_SCALE[:, :95], torch.ones(4, 2))),
    "another device": (errors.DeviceError, "meta", lambda: linear(CODES, SCALE.to("meta"), ONE)),
    "no values": (errors.DeviceError, "meta", lambda: linear(CODES.to("meta"), SCALE.to("meta"), ONE.to("meta"))),
    "block scales not loaded": (errors.NonFiniteError, "up has a NaN.*0x7f.*not loaded", lambda: linear(*_spoiled(CODES, SCALE, 0x7F), ONE, name="up")),
    "a negative block scale": (errors.NonFiniteError, "0x80", lambda: linear(*_spoiled(CODES, SCALE, 0x80), ONE)),
    "experts' block scales": (errors.NonFiniteError, "0xff", lambda: experts(*_spoiled(STACK, STACK_SCALE, 0xFF), FOUR)),
    "metadata": (errors.SparsityError, "o_proj: .*corrupt.*0x55", lambda: linear(CODES[:, :16], SCALE, ONE, meta=CODES[:, :8] * 0 + 0x55, name="o_proj")),
    **{
        f"global scale {value}, divides={divides}": (
            errors.NonFiniteError,
            r"not finite and positive; got 1 of 3: .*not loaded",
            lambda value=value, divides=divides: linear(CODES, SCALE, torch.tensor([1.0, value, 1.0]), output_sizes=SIZES, divides=divides),
        )
        for value in (math.nan, 0.0, -1.0, math.inf)
        for divides in (False, True)
    },
    "an expert not loaded": (
        errors.NonFiniteError,
        r"2 of 8: \[nan, nan\]",
        lambda: experts(STACK, STACK_SCALE, torch.tensor([[1.0, 1.0]] * 3 + [[math.nan] * 2])),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    kind, message, call = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert None not in (caught.value.value, caught.value.limit, caught.value.remedy)


# --- the reciprocal -------------------------------------------------------------------------------------------------


def one_by_one(g: torch.Tensor, dividing: bool) -> torch.Tensor:
    """Of one scale: the neighbour of 1 / g, nearest first, that changes the fewest products."""
    near = g.reciprocal()
    if not bool(torch.isfinite(near) & (near > 0) & torch.isfinite(g) & (g > 0)):
        return near
    ours, theirs = (multiplied, divided) if dividing else (divided, multiplied)
    want = theirs(g)
    candidates = [(near.view(torch.int32) + step).view(torch.float32) for step in (0, 1, -1, 2, -2, 3, -3)]
    return min(candidates, key=lambda c: int((ours(c) != want).sum()))


@pytest.mark.parametrize("dividing", [True, False])
def test_reciprocals_at_once_are_those_one_by_one(dividing):
    mantissas = 1 + torch.arange(128) / 128
    g = torch.cat((torch.exp(torch.rand(300) * 20 - 4) * 2688, mantissas / 8 / 2688, mantissas / 8 / 1536, 8 * 2688 / mantissas))
    g = torch.cat((g, torch.tensor([0.0, math.inf, math.nan, -1.0, 1e-40, 3e38])))
    want = torch.stack([one_by_one(v, dividing) for v in g])
    found = reciprocal_scale(g, dividing=dividing)
    assert torch.equal(found.view(torch.int32), want.view(torch.int32)) or torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0))
    assert torch.equal(reciprocal_scale(g[:684].view(2, 342), dividing=dividing), want[:684].view(2, 342))
    assert reciprocal_scale(g[:0]).shape == (0,) and reciprocal_scale(g[0]).shape == ()


def test_which_reciprocals_are_exact():
    g = (1 + torch.arange(128) / 128) / 8 / 2688
    assert int(is_exact(g, reciprocal_scale(g, dividing=False)).sum()) == 126  # two of the scales of a bfloat16 maximum have no exact partner
