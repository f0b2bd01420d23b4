"""Host side of fp4.moe on CUDA: the self-dispatching op. No host read (but for float32), current stream, no atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import DeviceError
from ...ops import moe as contract
from ...ops.dequantize_fp8 import WEIGHT_FACTOR
from ...ops.moe_call import ExpertWeight, MoeCall
from ...ops.quantize_rows_fp8 import E4M3_MAX
from .. import host, select
from ..dequantize import launch as dequantize
from . import by_expert, configs, decode_table, grouped_wide
from .triton_decode import moe_decode_down, moe_decode_up
from .triton_grouped import moe_combine, moe_grouped_down, moe_grouped_up
from .triton_many import moe_many_between, moe_many_in, moe_many_product
from .triton_route import moe_route


def moe(call: MoeCall) -> Tensor:
    """``[T, N]`` by the row that ``select.plan`` gives for this T * k and E."""
    contract.check(call)
    hidden, gate_up, down, inner, experts = call.hidden, call.gate_up, call.down, call.inner, call.experts
    if hidden.device.type != "cuda":
        raise DeviceError("the CUDA kernel of fp4.moe got tensors elsewhere", value=str(hidden.device), limit="cuda", remedy="Move them with .to('cuda').")
    k, width = hidden.shape[1], call.width
    if call.assignments == 0 or experts == 0 or width == 0:
        return hidden.new_zeros((hidden.shape[0], width))
    if k == 0 or inner == 0:  # biases alone remain; a shape no model has
        return contract.reference(call)
    biases = (b.dtype for b in (gate_up.bias, down.bias) if b is not None)
    op = select.moe_op(gate_up.meta, down.meta)
    form = select.moe_form(call.activation.name, call.gated, inner, experts, call.weight_on_input, biases, op)
    scales = select.scales_of(gate_up.global_scale.shape)
    row = host.row_for(op, hidden, call.assignments, width, k, call.prefill, experts, form=form, scales=scales)
    if row.kernel == BY_EXPERT:
        return by_expert.moe(call)
    with torch.cuda.device(hidden.device):
        return _LAUNCHERS[row.kernel](dense(call))


def dense(call: MoeCall) -> MoeCall:
    """``call`` as the launchers take it: contiguous and aligned, global scales ``[E]`` or ``[2 * E]``, those of gate and of up side by side."""
    table = call.expert_map
    return MoeCall(
        host.aligned(call.hidden), call.expert_ids.contiguous(), call.expert_weights.contiguous(), _dense_weight(call.gate_up), _dense_weight(call.down),
        call.activation, call.weight_on_input, None if table is None else table.contiguous(), call.prefill,
    )  # fmt: skip


def _dense_weight(w: ExpertWeight) -> ExpertWeight:
    bias, meta = None if w.bias is None else w.bias.contiguous(), None if w.meta is None else host.aligned(w.meta)
    return ExpertWeight(host.aligned(w.qdata), host.aligned(w.scale), w.global_scale.reshape(-1).contiguous(), bias, meta)


def _activation(call: MoeCall) -> dict[str, object]:
    """Constexprs of the kernels that apply it."""
    act = call.activation
    constants = dict(ALPHA=act.alpha, LIMIT=act.limit or 0.0, ACT=act.name, GATED=call.gated, INTERLEAVED=act.interleaved)
    return {**constants, "ON_INPUT": call.weight_on_input}


def _routing(call: MoeCall) -> tuple[Tensor, Tensor | None, int]:
    """``(ids, map, size of the map)``."""
    return call.expert_ids, call.expert_map, 0 if call.expert_map is None else call.expert_map.shape[0]


def _bytes(w: ExpertWeight) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    return w.qdata, w.meta, w.scale.view(torch.uint8), w.global_scale


def _launch(c: configs.DecodeConfig, constants: dict[str, object]) -> dict[str, object]:
    return {"num_warps": c.num_warps, **host.launched_early(bool(constants["PDL"]))}


def decode(call: MoeCall, up: configs.DecodeConfig | None = None, down: configs.DecodeConfig | None = None) -> Tensor:
    """A few tokens: two launches; see :mod:`.triton_decode`."""
    down = down or configs.decode_down(call.inner, call.expert_ids.shape[1], call.expert_ids.shape[0])
    return decode_down(call, *decode_up(call, down, up), down)


def decode_up(call: MoeCall, down: configs.DecodeConfig, tile: configs.DecodeConfig | None = None) -> tuple[Tensor, Tensor]:
    """``h`` of every assignment in float16 as the second kernel with tile ``down`` reads it, and float32 factors; nothing for assignments without an expert."""
    hidden, device = call.hidden.shape[1], call.hidden.device
    ids, table, table_size = _routing(call)
    sparse, sparse_down = (w.meta is not None for w in (call.gate_up, call.down))
    c = tile or configs.decode_up(hidden, call.hidden.shape[0])
    constants = configs.decode_constants(c, call.inner, hidden, host.arch(device), sparse)
    h = torch.empty(call.assignments, -(-call.inner // down.block_k) * down.block_k, dtype=torch.float16, device=device)
    factor = torch.empty(call.assignments, call.inner // 16, dtype=torch.float32, device=device)
    moe_decode_up[(-(-call.inner // c.block_n) * call.assignments,)](
        call.hidden, ids, call.expert_weights, table, *_bytes(call.gate_up), call.gate_up.bias, h, factor, ids.shape[1], call.assignments,
        call.experts, table_size, h.shape[1], (down.block_k // 32).bit_length() - 1, INNER=call.inner, **_activation(call),
        HAS_MAP=table is not None, HAS_BIAS=call.gate_up.bias is not None, SPARSE_DOWN=sparse_down, TWO=call.two_scales, **constants,
        **_launch(c, constants),
    )  # fmt: skip
    return h, factor


def decode_down(call: MoeCall, h: Tensor, factor: Tensor, c: configs.DecodeConfig) -> Tensor:
    """The result from what :func:`decode_up`, the launch before, gave."""
    (t, top_k), device = call.expert_ids.shape, call.hidden.device
    ids, table, table_size = _routing(call)
    sparse = call.down.meta is not None
    constants = configs.decode_constants(c, call.width, call.inner, host.arch(device), sparse)
    y = torch.empty(t, call.width, dtype=call.hidden.dtype, device=device)
    moe_decode_down[(-(-call.width // c.block_n) * t,)](
        h, factor, ids, call.expert_weights, table, *_bytes(call.down), call.down.bias, y, t, call.experts, table_size, call.width,
        TOP_K=top_k, ON_INPUT=call.weight_on_input, HAS_MAP=table is not None, HAS_BIAS=call.down.bias is not None, **constants,
        **_launch(c, constants),
    )  # fmt: skip
    return y


@dataclass(frozen=True)
class Routing:
    """What :mod:`.triton_route` writes."""

    order: Tensor
    place: Tensor
    ends: Tensor
    tile_expert: Tensor
    tile_start: Tensor


def route(call: MoeCall, block_m: int) -> Routing:
    """One launch. ``order`` behind the last expert's assignments, and ``place`` of those without an expert, stay unwritten."""
    ids, table, table_size = _routing(call)
    n_slots = configs.slots(call.assignments, call.experts, block_m)
    sizes = (call.assignments, call.assignments, call.experts, n_slots, n_slots)
    steps = [-(-size // 4) * 4 for size in sizes]  # each part aligned to 16 bytes
    memory = torch.empty(sum(steps), dtype=torch.int32, device=ids.device)
    out = Routing(*(part[:size] for part, size in zip(memory.split(steps), sizes, strict=True)))
    moe_route[(call.experts,)](
        ids, table, out.order, out.place, out.ends, out.tile_expert, out.tile_start, call.assignments, call.experts, table_size, n_slots,
        BLOCK_M=block_m, HAS_MAP=table is not None, **configs.route(call.assignments),
    )  # fmt: skip
    return out


def grouped(call: MoeCall, tile: configs.GroupedConfig | None = None) -> Tensor:
    """Routing, two grouped tensor-core products with the weights decoded in registers, the sum: four launches; see :mod:`.triton_grouped`."""
    c = tile or configs.grouped(call.assignments, call.experts, call.gated)
    routing = route(call, c.block_m)
    n_slots = routing.tile_expert.shape[0]
    dtype, device = call.hidden.dtype, call.hidden.device
    h = torch.empty(call.assignments, call.inner, dtype=dtype, device=device)
    out = torch.empty(call.assignments, call.width, dtype=torch.float32, device=device)
    up, down = (configs.grouped_constants(c, dtype, w.meta is not None) for w in (call.gate_up, call.down))
    shared = (routing.order, routing.ends, routing.tile_expert, routing.tile_start)
    launch = dict(num_warps=c.num_warps, num_stages=c.num_stages)
    moe_grouped_up[(-(-call.inner // c.block_n) * n_slots,)](
        call.hidden, call.expert_weights, *shared, *_bytes(call.gate_up), call.gate_up.bias, h, call.expert_ids.shape[1], call.inner, call.hidden.shape[1],
        **_activation(call), HAS_BIAS=call.gate_up.bias is not None, TWO=call.two_scales, **up, **launch,
    )  # fmt: skip
    moe_grouped_down[(-(-call.width // c.block_n) * n_slots,)](
        h, *shared, *_bytes(call.down), call.down.bias, out, call.width, call.inner,
        HAS_BIAS=call.down.bias is not None, **down, **launch,
    )  # fmt: skip
    return combine(call, out, None)


def wide(call: MoeCall, tokens: int = 0, fp8: bool = False) -> Tensor:
    """The same in CUDA, activations arranged once: four or five launches; see ``csrc/moe/grouped_wide.cu``."""
    return grouped_wide.launch(call, host.arch(call.hidden.device), tokens, fp8)


def wide_fp8(call: MoeCall, tokens: int = 0) -> Tensor:
    """FP8 products with the weights rounded to E4M3 in registers: six launches; see ``csrc/moe/grouped_wide_fp8.cu``."""
    return wide(call, tokens, fp8=True)


def table(call: MoeCall) -> Tensor:
    """A few tokens in CUDA, dense or 2:4-sparse: two launches for every eight; see ``csrc/moe/decode_table.cu``."""
    return decode_table.launch(call, host.arch(call.hidden.device))


def combine(call: MoeCall, out: Tensor, place: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Each token's weighted sum of rows of ``out`` (row = assignment, or its ``place``), and of the bias of their experts. One launch."""
    ids, table, table_size = _routing(call)
    t = call.hidden.shape[0]
    y = torch.empty(t, call.width, dtype=call.hidden.dtype, device=out.device)
    moe_combine[(-(-call.width // configs.COMBINE_BLOCK) * t,)](
        out, place, ids, call.expert_weights, table, bias, y, call.experts, table_size, call.width,
        TOP_K=ids.shape[1], ON_INPUT=call.weight_on_input, HAS_MAP=table is not None, SORTED=place is not None, HAS_BIAS=bias is not None,
        BLOCK_N=configs.COMBINE_BLOCK, num_warps=4,
    )  # fmt: skip
    return y


# --- many tokens: transient dense weights, grouped products ---------------------------------------------------------


Rows = tuple[Tensor, Tensor | None]  # assignments sorted by expert, and of E4M3 their scales
# The global scales of the weight are of experts [E] or of their rows [E, n]; its bias is not read.
Product = Callable[[Rows, ExpertWeight, Routing, torch.dtype], Tensor]


def large_dense(call: MoeCall) -> Tensor:
    """Grouped bfloat16 products of ``torch._grouped_mm``."""
    return _many(call, _bf16_product, fp8=False)


def large_fp8(call: MoeCall, tile: configs.ManyConfig | None = None) -> Tensor:
    """Grouped FP8 products of :func:`.triton_many.moe_many_product`; tokens rounded to E4M3 per row."""
    c = tile or configs.many(call.assignments, call.experts)

    def product(rows: Rows, weight: ExpertWeight, routing: Routing, dtype: torch.dtype) -> Tensor:
        return multiply_fp8(rows, transient_fp8(weight, routing.ends), weight.global_scale, routing, dtype, c)

    return _many(call, product, fp8=True, block_m=c.block_m)


def _many(call: MoeCall, product: Product, fp8: bool, block_m: int = 64) -> Tensor:
    routing = route(call, block_m)
    gate_up = call.gate_up
    if call.two_scales:
        gate_up = replace(gate_up, global_scale=contract.scale_of_rows(gate_up.global_scale.view(-1, 2), gate_up.n, call.activation.interleaved))
    z = _in_parts(sorted_rows(call, routing, fp8), gate_up, routing, call.hidden.dtype, product)
    h = activated_rows(call, routing, z, fp8)
    return combine(call, _in_parts(h, call.down, routing, call.hidden.dtype, product), routing.place, call.down.bias)


def _rows(call: MoeCall, columns: int, fp8: bool) -> Rows:
    rows = torch.empty(call.assignments, columns, dtype=torch.float8_e4m3fn if fp8 else call.hidden.dtype, device=call.hidden.device)
    return rows, torch.empty(call.assignments, dtype=torch.float32, device=call.hidden.device) if fp8 else None


def sorted_rows(call: MoeCall, routing: Routing, fp8: bool) -> Rows:
    """The token of every assignment, in the order of the experts. One launch; rows behind the last expert's stay unwritten, and no one reads them."""
    t, k = call.hidden.shape
    rows, scale = _rows(call, k, fp8)
    ids, table, table_size = _routing(call)
    block, one_step, warps = configs.whole_row(k)
    moe_many_in[(t,)](
        call.hidden, ids, call.expert_weights, table, routing.place, rows, scale, ids.shape[1], call.experts, table_size, k, E4M3_MAX,
        ON_INPUT=call.weight_on_input, HAS_MAP=table is not None, FP8=fp8, ONE_STEP=one_step, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return rows, scale


def activated_rows(call: MoeCall, routing: Routing, z: Tensor, fp8: bool) -> Rows:
    """act(z + bias) ``[T * k, I]`` of the first product. One launch."""
    rows, scale = _rows(call, call.inner, fp8)
    ids, table, table_size = _routing(call)
    block, one_step, warps = configs.whole_row(call.inner)
    constants = _activation(call)
    del constants["ON_INPUT"]
    moe_many_between[(call.assignments,)](
        z, routing.order, routing.ends, ids, table, call.gate_up.bias, rows, scale, call.experts, table_size, call.inner, E4M3_MAX,
        **constants, HAS_MAP=table is not None, HAS_BIAS=call.gate_up.bias is not None, FP8=fp8, ONE_STEP=one_step, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return rows, scale


def _in_parts(rows: Rows, weight: ExpertWeight, routing: Routing, dtype: torch.dtype, product: Product) -> Tensor:
    """``[T * k, n]``: by as many outputs of every expert at a time as :data:`configs.TRANSIENT_BYTES` allow."""
    codes, scale, global_scale, meta = weight.qdata, weight.scale, weight.global_scale, weight.meta
    experts, n, groups = scale.shape
    step = configs.part_of_rows(n, experts * groups * 16 * rows[0].element_size())
    if step == n:
        return product(rows, weight, routing, dtype)
    out = torch.empty(rows[0].shape[0], n, dtype=dtype, device=codes.device)
    for start in range(0, n, step):
        part = slice(start, start + step)
        g = global_scale[:, part].contiguous() if global_scale.dim() == 2 else global_scale
        some = ExpertWeight(codes[:, part], scale[:, part], g, None, None if meta is None else meta[:, part])
        out[:, part] = product(rows, some, routing, dtype)
    return out


def _bf16_product(rows: Rows, weight: ExpertWeight, routing: Routing, dtype: torch.dtype) -> Tensor:
    return torch._grouped_mm(rows[0], _transient(weight, weight.global_scale, dtype, routing.ends).mT, offs=routing.ends)


def _transient(weight: ExpertWeight, global_scale: Tensor | None, dtype: torch.dtype, ends: Tensor) -> Tensor:
    packed, scale = weight.packed, weight.scale
    if global_scale is None or global_scale.dim() == 1:
        return dequantize.transient(packed, scale, global_scale, dtype, ends)
    experts, n = global_scale.shape  # every row is a matrix
    rows = (t.reshape(experts * n, 1, -1) for t in (*packed, scale))
    *packed_rows, scale_rows = rows
    return dequantize.transient(tuple(packed_rows), scale_rows, global_scale.reshape(-1), dtype, ends, n).view(experts, n, -1)


def transient_fp8(weight: ExpertWeight, ends: Tensor) -> Tensor:
    """E4M3 ``[E, n, K]``, the global scales left out."""
    return _transient(weight, None, torch.float8_e4m3fn, ends)


def multiply_fp8(rows: Rows, w8: Tensor, global_scale: Tensor, routing: Routing, dtype: torch.dtype, tile: configs.ManyConfig) -> Tensor:
    """``[T * k, n]`` of E4M3 rows and weights; ``routing`` for ``tile.block_m``. One launch."""
    (x8, row_scale), (experts, n, k), slots = rows, w8.shape, routing.tile_expert.shape[0]
    out = torch.empty(x8.shape[0], n, dtype=dtype, device=x8.device)
    moe_many_product[(-(-n // tile.block_n) * slots,)](
        TensorDescriptor.from_tensor(x8, [tile.block_m, tile.block_k]), row_scale, routing.ends, routing.tile_expert, routing.tile_start,
        TensorDescriptor.from_tensor(w8.view(experts * n, k), [tile.block_n, tile.block_k]), global_scale, out, n, k, slots, 1.0 / WEIGHT_FACTOR,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, EXACT=tile.exact, OF_ROWS=global_scale.dim() == 2,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


BY_EXPERT = "by expert"
_LAUNCHERS: dict[str, Callable[[MoeCall], Tensor]] = {
    "triton_moe_decode": decode,
    "cuda_moe_table": table,
    "triton_moe_grouped": grouped,
    "cuda_moe_wide": wide,
    "cuda_moe_wide_fp8": wide_fp8,
    "dequantize_fp8 + triton_grouped_fp8": large_fp8,
    "dequantize + grouped_mm": large_dense,
    "triton_sparse_moe_decode": decode,
    "cuda_sparse_moe_table": table,
    "triton_sparse_moe_grouped": grouped,
    "sparse_dequantize_fp8 + triton_grouped_fp8": large_fp8,
    "sparse_dequantize + grouped_mm": large_dense,
}
