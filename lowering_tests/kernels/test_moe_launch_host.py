"""The host side of fp4.moe on CUDA, without a GPU: how many launches, on which grids, and the grouped bf16 product of torch on a CPU."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import host
from fp4_inductor.kernels.dequantize import launch as dequantize
from fp4_inductor.kernels.moe import cuda, decode, decode_table, grouped, many, on_csrc, routing, triton_decode, triton_grouped, triton_many, triton_route
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.moe_call import ExpertWeight, MoeCall

SOURCES = {
    triton_route: ("moe_route",),
    triton_many: ("moe_many_in", "moe_many_between", "moe_many_product"),
    triton_grouped: ("moe_combine", "moe_grouped_up", "moe_grouped_down"),
    triton_decode: ("moe_decode_up", "moe_decode_down"),
}
KERNELS = {name: module for module, names in SOURCES.items() for name in names}
KERNEL_SOURCES = types.SimpleNamespace(**{name: getattr(module, name) for name, module in KERNELS.items()})
DEQUANTIZE = dequantize.dequantize_rows


class Spy:
    """Stands for a Triton kernel: ``kernel[grid](...)`` is written down."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((self.name, grid, args, kwargs))


@pytest.fixture
def launches():
    calls = []
    with contextlib.ExitStack() as stack:
        for name, module in KERNELS.items():
            stack.enter_context(mock.patch.object(module, name, Spy(name, calls)))
        stack.enter_context(mock.patch.object(host, "arch", return_value=90))
        yield calls


def layer(t, k=2, e=8, h=64, inner=48, dtype=torch.bfloat16, act=None, gated=True, biased=False, ids=None, sparse=(False, False)):
    rows = 2 * inner if gated else inner
    dense = [torch.randn(e, n, c) / c**0.5 for n, c in ((rows, h), (h, inner))]
    quantized = [sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w)) if s else nvfp4.quantize(w) for w, s in zip(dense, sparse, strict=True)]
    biases = (torch.randn(e, rows).to(dtype), torch.randn(e, h).to(dtype)) if biased else (None, None)
    ids = torch.randint(0, e, (t, k)) if ids is None else ids
    weights = map(ExpertWeight.of_parts, quantized, biases)
    return cuda.dense(MoeCall(torch.randn(t, h).to(dtype), ids, torch.rand(t, k), *weights, act or Activation()))


def test_decode_is_two_launches(launches):
    y = decode.decode(layer(3))
    assert [name for name, *_ in launches] == ["moe_decode_up", "moe_decode_down"]
    up, down = decode.up_tile(64, 3), decode.down_tile(48, 2, 3)
    assert [grid for _, grid, *_ in launches] == [(-(-48 // up.block_n) * 6,), (-(-64 // down.block_n) * 3,)]
    assert (tuple(y.shape), y.dtype) == ((3, 64), torch.bfloat16)


def test_grouped_is_four_launches_and_no_memory_is_cleared(launches):
    with mock.patch.object(torch, "zeros", side_effect=AssertionError("a launch to clear memory")):
        grouped.grouped(layer(40))
    assert [name for name, *_ in launches] == ["moe_route", "moe_grouped_up", "moe_grouped_down", "moe_combine"]
    tile = grouped.tile_for(80, 8, True)
    slots = routing.slots(80, 8, tile.block_m)
    assert [grid for _, grid, *_ in launches] == [(8,), (-(-48 // tile.block_n) * slots,), (-(-64 // tile.block_n) * slots,), (40,)]
    outputs = launches[0][2][2:7]
    assert [t.numel() for t in outputs] == [80, 80, 8, slots, slots]
    assert all(t.data_ptr() % 16 == 0 for t in outputs)


def test_sparse_decode_is_two_launches_on_grids_of_its_own_tiles(launches):
    decode.decode(layer(3, inner=96, sparse=(True, True)))
    up, down = decode.up_tile(64, 3), decode.down_tile(96, 2, 3)
    assert [(name, grid) for name, grid, *_ in launches] == [
        ("moe_decode_up", (-(-96 // up.block_n) * 6,)),
        ("moe_decode_down", (-(-64 // down.block_n) * 3,)),
    ]
    assert all(kwargs["SPARSE"] for *_, kwargs in launches)


@pytest.mark.parametrize("sparse", [(False, False), (True, False), (True, True)])
def test_the_table_kernel_gets_the_layer(launches, sparse):
    call = layer(11, k=3, h=256, inner=256, sparse=sparse)
    with mock.patch.object(on_csrc.torch.ops.fp4_csrc, "moe_decode_table") as op:
        decode_table.table(call)
    *given, arch = op.call_args.args
    assert launches == [] and arch == 90
    assert (
        given[:3] == [call.hidden, call.expert_ids, call.expert_weights]
        and given[12:14] == [call.gate_up.meta, call.down.meta]
        and given[14:] == [1.0, 0.0, 0, 0]
    )


def test_every_argument_has_a_parameter():
    """A spy takes anything; the kernels do not."""
    for dtype, act, biased in ((torch.bfloat16, Activation(), False), (torch.float16, Activation("swiglu_oai", 1.702, 7.0, True), True)):
        calls = []
        with contextlib.ExitStack() as stack:
            for name, module in KERNELS.items():
                stack.enter_context(mock.patch.object(module, name, Spy(name, calls)))
            stack.enter_context(mock.patch.object(host, "arch", return_value=90))
            decode.decode(layer(3, dtype=dtype, act=act, biased=biased))
            decode.decode(layer(3, dtype=dtype, inner=64, sparse=(True, True)))
            grouped.grouped(layer(30, dtype=dtype, sparse=(True, False)))
            grouped.grouped(layer(30, dtype=dtype, act=act, biased=biased))
            routing.combine(layer(3), torch.zeros(6, 64), torch.zeros(6, dtype=torch.int32))
        for name, _, args, kwargs in calls:
            names = getattr(KERNEL_SOURCES, name).arg_names
            given = list(names[: len(args)]) + [k for k in kwargs if k not in ("num_warps", "num_stages", "launch_pdl")]
            assert sorted(given) == sorted(names), name


def routed(c, block_m):
    """What the routing kernel writes, by torch; what it leaves unwritten points nowhere."""
    local = contract.local_ids(c.expert_ids.flatten(), c.expert_map, c.experts)
    order = torch.argsort(torch.where(local < 0, c.experts, local), stable=True)
    valid = int((local >= 0).sum())
    place = torch.full((c.assignments,), 2**30, dtype=torch.int32)
    place[order[:valid]] = torch.arange(valid, dtype=torch.int32)
    order[valid:] = 2**30
    ends = torch.bincount(local[local >= 0], minlength=c.experts).cumsum(0)
    return routing.Routing(order.int(), place, ends.int(), order.int(), order.int())


def sorted_rows(c, routing, fp8):
    out = torch.full((c.assignments, c.hidden.shape[1]), float("nan"), dtype=c.hidden.dtype)
    valid = int(routing.ends[-1])
    out[:valid] = c.hidden[routing.order[:valid].long() // c.expert_ids.shape[1]]
    return out, None


def activated_rows(c, routing, z, fp8):
    out = torch.full((c.assignments, c.inner), float("nan"), dtype=c.hidden.dtype)
    valid = int(routing.ends[-1])
    z = z[:valid].float()
    if c.gate_up.bias is not None:
        z += c.gate_up.bias.float()[contract.local_ids(c.expert_ids, c.expert_map, c.experts).flatten()[routing.order[:valid].long()]]
    out[:valid] = c.activation(z, c.inner).to(out.dtype)
    return out, None


def combined(c, out, place, bias):
    local = contract.local_ids(c.expert_ids, c.expert_map, c.experts)
    rows = out.float()[torch.where(local >= 0, place.view(local.shape), 0).long()]
    rows = rows if bias is None else rows + bias.float()[local.clamp_min(0)]
    return torch.where((local >= 0)[..., None], rows * c.expert_weights[..., None], 0.0).sum(1).to(c.hidden.dtype)


def transient(packed, scale, global_scale, dtype, ends):
    codes, *meta = packed
    return nvfp4.dequantize(sparse24.decompress(codes, meta[0]) if meta else codes, scale, global_scale, dtype)


FORMS = [
    (Activation(), True, False, (False, False)),
    (Activation("swiglu_oai", 1.702, 7.0, True), True, True, (False, False)),
    (Activation("relu2"), False, True, (False, False)),
    (Activation(), True, True, (True, True)),
    (Activation("swiglu_oai", 1.702, 7.0, True), True, False, (True, False)),
]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("act", "gated", "biased", "sparse"), FORMS)
def test_the_transient_weight_path_with_torchs_grouped_product(act, gated, biased, sparse, parts):
    """torch._grouped_mm on a CPU, bfloat16; the kernels around it are replaced."""
    inner = 64 if sparse[1] else 48
    c = layer(30, 3, inner=inner, act=act, gated=gated, biased=biased, ids=torch.randint(-1, 9, (30, 3)), sparse=sparse)
    want = contract.reference(c).double()
    limit = 1 << 30 if parts == 1 else 8 * 2 * 64 * 16
    ours = dict(route=routed, sorted_rows=sorted_rows, activated_rows=activated_rows, combine=combined)
    with contextlib.ExitStack() as stack:
        for name, f in ours.items():
            stack.enter_context(mock.patch.object(many, name, f))
        product = stack.enter_context(mock.patch.object(torch, "_grouped_mm", wraps=torch._grouped_mm))
        stack.enter_context(mock.patch.object(dequantize, "transient", transient))
        stack.enter_context(mock.patch.object(many, "TRANSIENT_BYTES", limit))
        got = many.large_dense(c).double()
    assert float((got - want).norm() / want.norm()) < 8e-3
    assert product.call_count == 2 if parts == 1 else product.call_count > 4


@pytest.mark.parametrize(("act", "gated", "biased", "sparse"), FORMS)
def test_many_tokens_are_eight_launches(launches, act, gated, biased, sparse):
    """Nothing else touches a row: no pass to gather, to add a bias, to round."""
    c = layer(30, 3, inner=64, act=act, gated=gated, biased=biased, sparse=sparse)
    with (
        mock.patch.object(dequantize, "dequantize_rows", Spy("dequantize_rows", launches)),
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
    ):
        y = many.large_fp8(c)
    assert (tuple(y.shape), y.dtype) == ((30, 64), torch.bfloat16)
    product = ["dequantize_rows", "moe_many_product"]
    assert [name for name, *_ in launches] == ["moe_route", "moe_many_in", *product, "moe_many_between", *product, "moe_combine"]
    assert [grid for _, grid, *_ in launches][:2] == [(8,), (30,)]
    assert [kwargs["ENDS"] is not None for name, _, _, kwargs in launches if name == "dequantize_rows"] == [True, True]
    tile, tiles = many.tile_for(90, 8), launches[0][3]["BLOCK_M"]
    assert tiles == tile.block_m
    rows = 128 if gated else 64
    products = [(grid, args) for name, grid, args, _ in launches if name == "moe_many_product"]
    assert [grid for grid, _ in products] == [(-(-n // tile.block_n) * routing.slots(90, 8, tiles),) for n in (rows, 64)]
    assert [(a[0].base.dtype, tuple(a[0].base.shape), tuple(a[5].base.shape)) for _, a in products] == [
        (torch.float8_e4m3fn, (90, 64), (8 * rows, 64)),
        (torch.float8_e4m3fn, (90, 64), (8 * 64, 64)),
    ]
    for name, _, args, kwargs in launches:
        kernel = DEQUANTIZE if name == "dequantize_rows" else getattr(KERNEL_SOURCES, name)
        given = list(kernel.arg_names[: len(args)]) + [k for k in kwargs if k not in ("num_warps", "num_stages")]
        assert sorted(given) == sorted(kernel.arg_names), name
