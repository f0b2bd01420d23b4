"""Host side of fp4.moe on CUDA: the self-dispatching op. No host read (but for float32), current stream, no atomics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import DeviceError
from ...ops import moe as contract
from ...ops.activation import Activation
from ...ops.dequantize_fp8 import WEIGHT_FACTOR
from ...ops.quantize_rows_fp8 import E4M3_MAX
from .. import host, select
from ..dequantize import launch as dequantize
from . import by_expert, configs, decode_table, grouped_wide
from .triton_decode import moe_decode_down, moe_decode_up
from .triton_grouped import moe_combine, moe_grouped_down, moe_grouped_up
from .triton_many import moe_many_between, moe_many_in, moe_many_product
from .triton_route import moe_route


@dataclass(frozen=True)
class Layer:
    """The arguments of one call, contiguous and aligned; names as in :mod:`fp4_inductor.ops.moe`.

    ``gate_up``, ``down``: codes, scales and global scales, one for each expert, or two, of gate and of up, one behind the other; ``metas``: the
    metadata of both where they are 2:4-sparse.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    gate_up: tuple[Tensor, Tensor, Tensor]
    down: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor | None, Tensor | None]
    act: Activation
    on_input: bool
    map: Tensor | None
    metas: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def pairs(self) -> int:
        return self.ids.numel()

    @property
    def experts(self) -> int:
        return self.gate_up[0].shape[0]

    @property
    def two_scales(self) -> bool:
        return self.gate_up[2].numel() != self.experts

    @property
    def inner(self) -> int:
        return contract.columns(self.down[0], self.metas[1])

    @property
    def width(self) -> int:
        return self.down[0].shape[1]

    @property
    def gated(self) -> bool:
        return self.gate_up[0].shape[1] != self.inner

    def activation(self) -> dict[str, object]:
        """Constexprs of the kernels that apply it."""
        constants = dict(ALPHA=self.act.alpha, LIMIT=self.act.limit or 0.0, ACT=self.act.name, GATED=self.gated, INTERLEAVED=self.act.interleaved)
        return {**constants, "ON_INPUT": self.on_input}

    def routing(self) -> tuple[Tensor, Tensor | None, int]:
        """``(ids, map, size of the map)``."""
        return self.ids, self.map, 0 if self.map is None else self.map.shape[0]


def moe(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor,
    gate_up_qdata: Tensor, gate_up_scale: Tensor, gate_up_global_scale: Tensor, down_qdata: Tensor, down_scale: Tensor, down_global_scale: Tensor,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None,
    activation: str = "silu", alpha: float = 1.0, limit: float | None = None, interleaved: bool = False,
    weight_on_input: bool = False, expert_map: Tensor | None = None, prefill: str = "auto", gate_up_meta: Tensor | None = None, down_meta: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``[T, N]`` by the row that ``select.plan`` gives for this T * k and E."""
    args = (
        hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, down_scale, down_global_scale,
        gate_up_bias, down_bias, activation, alpha, limit, interleaved, weight_on_input, expert_map, prefill, gate_up_meta, down_meta,
    )  # fmt: skip
    contract.check(*args)
    if hidden.device.type != "cuda":
        raise DeviceError("the CUDA kernel of fp4.moe got tensors elsewhere", value=str(hidden.device), limit="cuda", remedy="Move them with .to('cuda').")
    experts, k = gate_up_qdata.shape[0], hidden.shape[1]
    width, inner = down_qdata.shape[1], contract.columns(down_qdata, down_meta)
    if expert_ids.numel() == 0 or experts == 0 or width == 0:
        return hidden.new_zeros((hidden.shape[0], width))
    if k == 0 or inner == 0:  # biases alone remain; a shape no model has
        return contract.reference(*args)
    biases = (b.dtype for b in (gate_up_bias, down_bias) if b is not None)
    op = select.moe_op(gate_up_meta, down_meta)
    form = select.moe_form(activation, gate_up_qdata.shape[1] != inner, inner, experts, weight_on_input, biases, op)
    scales = select.scales_of(gate_up_global_scale.shape)
    row = host.row_for(op, hidden, expert_ids.numel(), width, k, prefill, experts, form=form, scales=scales)
    if row.kernel == BY_EXPERT:
        return by_expert.moe(*args)
    layer = Layer(
        host.aligned(hidden), expert_ids.contiguous(), expert_weights.contiguous(),
        (host.aligned(gate_up_qdata), host.aligned(gate_up_scale), gate_up_global_scale.reshape(-1).contiguous()),
        (host.aligned(down_qdata), host.aligned(down_scale), down_global_scale.reshape(-1).contiguous()),
        (None if gate_up_bias is None else gate_up_bias.contiguous(), None if down_bias is None else down_bias.contiguous()),
        Activation(activation, alpha, limit, interleaved), weight_on_input, None if expert_map is None else expert_map.contiguous(),
        (None if gate_up_meta is None else host.aligned(gate_up_meta), None if down_meta is None else host.aligned(down_meta)),
    )  # fmt: skip
    with torch.cuda.device(hidden.device):
        return _LAUNCHERS[row.kernel](layer)


def _bytes(parts: tuple[Tensor, Tensor, Tensor], meta: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    return parts[0], meta, parts[1].view(torch.uint8), parts[2]


def _launch(c: configs.DecodeConfig, constants: dict[str, object]) -> dict[str, object]:
    return {"num_warps": c.num_warps, **host.launched_early(bool(constants["PDL"]))}


def decode(layer: Layer, up: configs.DecodeConfig | None = None, down: configs.DecodeConfig | None = None) -> Tensor:
    """A few tokens: two launches; see :mod:`.triton_decode`."""
    down = down or configs.decode_down(layer.inner, layer.ids.shape[1], layer.ids.shape[0])
    return decode_down(layer, *decode_up(layer, down, up), down)


def decode_up(layer: Layer, down: configs.DecodeConfig, tile: configs.DecodeConfig | None = None) -> tuple[Tensor, Tensor]:
    """``h`` of every pair in float16 as the second kernel with tile ``down`` reads it, and float32 factors; nothing for pairs without an expert."""
    hidden, device = layer.x.shape[1], layer.x.device
    ids, table, table_size = layer.routing()
    sparse, sparse_down = (meta is not None for meta in layer.metas)
    c = tile or configs.decode_up(hidden, layer.x.shape[0])
    constants = configs.decode_constants(c, layer.inner, hidden, host.arch(device), sparse)
    h = torch.empty(layer.pairs, -(-layer.inner // down.block_k) * down.block_k, dtype=torch.float16, device=device)
    factor = torch.empty(layer.pairs, layer.inner // 16, dtype=torch.float32, device=device)
    moe_decode_up[(-(-layer.inner // c.block_n) * layer.pairs,)](
        layer.x, ids, layer.weights, table, *_bytes(layer.gate_up, layer.metas[0]), layer.biases[0], h, factor, ids.shape[1], layer.pairs,
        layer.experts, table_size, h.shape[1], (down.block_k // 32).bit_length() - 1, INNER=layer.inner, **layer.activation(),
        HAS_MAP=table is not None, HAS_BIAS=layer.biases[0] is not None, SPARSE_DOWN=sparse_down, TWO=layer.two_scales, **constants,
        **_launch(c, constants),
    )  # fmt: skip
    return h, factor


def decode_down(layer: Layer, h: Tensor, factor: Tensor, c: configs.DecodeConfig) -> Tensor:
    """The result from what :func:`decode_up`, the launch before, gave."""
    (t, top_k), device = layer.ids.shape, layer.x.device
    ids, table, table_size = layer.routing()
    sparse = layer.metas[1] is not None
    constants = configs.decode_constants(c, layer.width, layer.inner, host.arch(device), sparse)
    y = torch.empty(t, layer.width, dtype=layer.x.dtype, device=device)
    moe_decode_down[(-(-layer.width // c.block_n) * t,)](
        h, factor, ids, layer.weights, table, *_bytes(layer.down, layer.metas[1]), layer.biases[1], y, t, layer.experts, table_size, layer.width,
        TOP_K=top_k, ON_INPUT=layer.on_input, HAS_MAP=table is not None, HAS_BIAS=layer.biases[1] is not None, **constants,
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


def route(layer: Layer, block_m: int) -> Routing:
    """One launch. ``order`` behind the last expert's pairs, and ``place`` of pairs without an expert, stay unwritten."""
    ids, table, table_size = layer.routing()
    n_slots = configs.slots(layer.pairs, layer.experts, block_m)
    sizes = (layer.pairs, layer.pairs, layer.experts, n_slots, n_slots)
    steps = [-(-size // 4) * 4 for size in sizes]  # each part aligned to 16 bytes
    memory = torch.empty(sum(steps), dtype=torch.int32, device=ids.device)
    out = Routing(*(part[:size] for part, size in zip(memory.split(steps), sizes, strict=True)))
    moe_route[(layer.experts,)](
        ids, table, out.order, out.place, out.ends, out.tile_expert, out.tile_start, layer.pairs, layer.experts, table_size, n_slots,
        BLOCK_M=block_m, HAS_MAP=table is not None, **configs.route(layer.pairs),
    )  # fmt: skip
    return out


def grouped(layer: Layer, tile: configs.GroupedConfig | None = None) -> Tensor:
    """Routing, two grouped tensor-core products with the weights decoded in registers, the sum: four launches; see :mod:`.triton_grouped`."""
    c = tile or configs.grouped(layer.pairs, layer.experts, layer.gated)
    routing = route(layer, c.block_m)
    n_slots = routing.tile_expert.shape[0]
    dtype, device = layer.x.dtype, layer.x.device
    h = torch.empty(layer.pairs, layer.inner, dtype=dtype, device=device)
    out = torch.empty(layer.pairs, layer.width, dtype=torch.float32, device=device)
    up, down = (configs.grouped_constants(c, dtype, meta is not None) for meta in layer.metas)
    shared = (routing.order, routing.ends, routing.tile_expert, routing.tile_start)
    launch = dict(num_warps=c.num_warps, num_stages=c.num_stages)
    moe_grouped_up[(-(-layer.inner // c.block_n) * n_slots,)](
        layer.x, layer.weights, *shared, *_bytes(layer.gate_up, layer.metas[0]), layer.biases[0], h, layer.ids.shape[1], layer.inner, layer.x.shape[1],
        **layer.activation(), HAS_BIAS=layer.biases[0] is not None, TWO=layer.two_scales, **up, **launch,
    )  # fmt: skip
    moe_grouped_down[(-(-layer.width // c.block_n) * n_slots,)](
        h, *shared, *_bytes(layer.down, layer.metas[1]), layer.biases[1], out, layer.width, layer.inner,
        HAS_BIAS=layer.biases[1] is not None, **down, **launch,
    )  # fmt: skip
    return combine(layer, out, None)


def wide(layer: Layer, tokens: int = 0, fp8: bool = False) -> Tensor:
    """The same in CUDA, activations arranged once: four or five launches; see ``csrc/moe/grouped_wide.cu``."""
    arch = host.arch(layer.x.device)
    return grouped_wide.call(layer.x, layer.ids, layer.weights, layer.gate_up, layer.down, layer.biases, layer.map, layer.act, arch, tokens, fp8)


def wide_fp8(layer: Layer, tokens: int = 0) -> Tensor:
    """FP8 products with the weights rounded to E4M3 in registers: six launches; see ``csrc/moe/grouped_wide_fp8.cu``."""
    return wide(layer, tokens, fp8=True)


def table(layer: Layer) -> Tensor:
    """A few tokens in CUDA, dense or 2:4-sparse: two launches for every eight; see ``csrc/moe/decode_table.cu``."""
    arch = host.arch(layer.x.device)
    return decode_table.call(layer.x, layer.ids, layer.weights, layer.gate_up, layer.down, layer.biases, layer.map, layer.metas, layer.act, arch)


def combine(layer: Layer, out: Tensor, place: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Each token's weighted sum of rows of ``out`` (row = pair, or ``place[pair]``), and of the bias of their experts. One launch."""
    ids, table, table_size = layer.routing()
    t = layer.x.shape[0]
    y = torch.empty(t, layer.width, dtype=layer.x.dtype, device=out.device)
    moe_combine[(-(-layer.width // configs.COMBINE_BLOCK) * t,)](
        out, place, ids, layer.weights, table, bias, y, layer.experts, table_size, layer.width,
        TOP_K=ids.shape[1], ON_INPUT=layer.on_input, HAS_MAP=table is not None, SORTED=place is not None, HAS_BIAS=bias is not None,
        BLOCK_N=configs.COMBINE_BLOCK, num_warps=4,
    )  # fmt: skip
    return y


# --- many tokens: transient dense weights, grouped products ---------------------------------------------------------


Rows = tuple[Tensor, Tensor | None]  # pairs sorted by expert, and of E4M3 their scales
Weight = tuple[Tensor, Tensor, Tensor, Tensor | None]  # codes, scales, global scales of experts [E] or of their rows [E, n], metadata
Product = Callable[[Rows, Weight, Routing, torch.dtype], Tensor]


def large_dense(layer: Layer) -> Tensor:
    """Grouped bfloat16 products of ``torch._grouped_mm``."""
    return _many(layer, _bf16_product, fp8=False)


def large_fp8(layer: Layer, tile: configs.ManyConfig | None = None) -> Tensor:
    """Grouped FP8 products of :func:`.triton_many.moe_many_product`; tokens rounded to E4M3 per row."""
    c = tile or configs.many(layer.pairs, layer.experts)

    def product(rows: Rows, weight: Weight, routing: Routing, dtype: torch.dtype) -> Tensor:
        return multiply_fp8(rows, transient_fp8(weight, routing.ends), weight[2], routing, dtype, c)

    return _many(layer, product, fp8=True, block_m=c.block_m)


def _many(layer: Layer, product: Product, fp8: bool, block_m: int = 64) -> Tensor:
    routing = route(layer, block_m)
    codes, scale, g = layer.gate_up
    if layer.two_scales:
        g = contract.scale_of_rows(g.view(-1, 2), codes.shape[1], layer.act.interleaved)
    z = _in_parts(sorted_rows(layer, routing, fp8), (codes, scale, g, layer.metas[0]), routing, layer.x.dtype, product)
    h = activated_rows(layer, routing, z, fp8)
    return combine(layer, _in_parts(h, (*layer.down, layer.metas[1]), routing, layer.x.dtype, product), routing.place, layer.biases[1])


def _rows(layer: Layer, columns: int, fp8: bool) -> Rows:
    rows = torch.empty(layer.pairs, columns, dtype=torch.float8_e4m3fn if fp8 else layer.x.dtype, device=layer.x.device)
    return rows, torch.empty(layer.pairs, dtype=torch.float32, device=layer.x.device) if fp8 else None


def sorted_rows(layer: Layer, routing: Routing, fp8: bool) -> Rows:
    """The token of every pair, in the order of the experts. One launch; rows behind the last expert's stay unwritten, and no one reads them."""
    t, k = layer.x.shape
    rows, scale = _rows(layer, k, fp8)
    ids, table, table_size = layer.routing()
    block, one_step, warps = configs.whole_row(k)
    moe_many_in[(t,)](
        layer.x, ids, layer.weights, table, routing.place, rows, scale, ids.shape[1], layer.experts, table_size, k, E4M3_MAX,
        ON_INPUT=layer.on_input, HAS_MAP=table is not None, FP8=fp8, ONE_STEP=one_step, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return rows, scale


def activated_rows(layer: Layer, routing: Routing, z: Tensor, fp8: bool) -> Rows:
    """act(z + bias) ``[pairs, I]`` of the first product. One launch."""
    rows, scale = _rows(layer, layer.inner, fp8)
    ids, table, table_size = layer.routing()
    block, one_step, warps = configs.whole_row(layer.inner)
    constants = layer.activation()
    del constants["ON_INPUT"]
    moe_many_between[(layer.pairs,)](
        z, routing.order, routing.ends, ids, table, layer.biases[0], rows, scale, layer.experts, table_size, layer.inner, E4M3_MAX,
        **constants, HAS_MAP=table is not None, HAS_BIAS=layer.biases[0] is not None, FP8=fp8, ONE_STEP=one_step, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return rows, scale


def _in_parts(rows: Rows, weight: Weight, routing: Routing, dtype: torch.dtype, product: Product) -> Tensor:
    """``[pairs, n]``: by as many outputs of every expert at a time as :data:`configs.TRANSIENT_BYTES` allow."""
    codes, scale, global_scale, meta = weight
    experts, n, groups = scale.shape
    step = configs.part_of_rows(n, experts * groups * 16 * rows[0].element_size())
    if step == n:
        return product(rows, weight, routing, dtype)
    out = torch.empty(rows[0].shape[0], n, dtype=dtype, device=codes.device)
    for start in range(0, n, step):
        part = slice(start, start + step)
        g = global_scale[:, part].contiguous() if global_scale.dim() == 2 else global_scale
        out[:, part] = product(rows, (codes[:, part], scale[:, part], g, None if meta is None else meta[:, part]), routing, dtype)
    return out


def _bf16_product(rows: Rows, weight: Weight, routing: Routing, dtype: torch.dtype) -> Tensor:
    return torch._grouped_mm(rows[0], _transient(weight, weight[2], dtype, routing.ends).mT, offs=routing.ends)


def _transient(weight: Weight, global_scale: Tensor | None, dtype: torch.dtype, ends: Tensor) -> Tensor:
    codes, scale, _, meta = weight
    packed = (codes,) if meta is None else (codes, meta)
    if global_scale is None or global_scale.dim() == 1:
        return dequantize.transient(packed, scale, global_scale, dtype, ends)
    experts, n = global_scale.shape  # every row is a matrix
    rows = (t.reshape(experts * n, 1, -1) for t in (*packed, scale))
    *packed_rows, scale_rows = rows
    return dequantize.transient(tuple(packed_rows), scale_rows, global_scale.reshape(-1), dtype, ends, n).view(experts, n, -1)


def transient_fp8(weight: Weight, ends: Tensor) -> Tensor:
    """E4M3 ``[E, n, K]``, the global scales left out."""
    return _transient(weight, None, torch.float8_e4m3fn, ends)


def multiply_fp8(rows: Rows, w8: Tensor, global_scale: Tensor, routing: Routing, dtype: torch.dtype, tile: configs.ManyConfig) -> Tensor:
    """``[pairs, n]`` of E4M3 rows and weights; ``routing`` for ``tile.block_m``. One launch."""
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
_LAUNCHERS: dict[str, Callable[[Layer], Tensor]] = {
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
