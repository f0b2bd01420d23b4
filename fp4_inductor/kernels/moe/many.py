"""Many tokens an expert: a pass writes temporary dense weights, FP8 or bfloat16, and grouped products read them. Source: :mod:`.triton_many`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ops import moe as contract
from ...ops.dequantize_fp8 import WEIGHT_FACTOR
from ...ops.moe_call import ExpertWeight, MoeCall
from ...ops.quantize_rows_fp8 import E4M3_MAX
from ..forms import Launches
from ..kernel import BF16, FP8, MEASURED, RIGHT, Kernel, On
from .routing import Routing, activation, combine, ids_and_map, route

# Dense weights that exist at once on the many-tokens path: all of a projection in E4M3 for every layer that is benchmarked (the largest has
# 2**30 weights, half of what the layer is in bfloat16); a larger one is multiplied in parts, which reads the rows of tokens once a part.
TRANSIENT_BYTES = 1 << 30


@dataclass(frozen=True)
class ManyConfig:
    """``block_m`` pairs of one expert by ``block_n`` outputs; ``group`` such rows of tiles take turns at the same outputs.

    ``exact``: E4M3 products whose float32 sums lose bits in the tensor cores' accumulators, at most; None: all of K.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    exact: int | None = None


def tile_for(pairs: int, experts: int) -> ManyConfig:
    """For ``pairs`` spread over ``experts``: the fastest of 15 tiles at 32 to 1024 tokens an expert (``benchmarks/many_products.py``)."""
    if pairs <= 48 * experts:
        return ManyConfig(64, 128, 128, 4, 4)
    return ManyConfig(128, 256, 128, 8, 4)


def whole_row(columns: int) -> tuple[int, bool, int]:
    """``(block, one step, warps)`` of the kernels before and between the products: a row of up to 16384 is held in registers."""
    if columns > 16384:
        return 2048, False, 8
    block = max(128, 1 << (columns - 1).bit_length())
    return block, True, max(1, min(16, block // (256 if block <= 2048 else 512)))


def part_of_rows(rows: int, bytes_a_row: int) -> int:
    """How many of ``rows`` outputs of every expert are dense at once: a multiple of 16 within :data:`TRANSIENT_BYTES`, at least 16."""
    fit = TRANSIENT_BYTES // max(bytes_a_row, 1) // 16 * 16
    return min(rows, max(16, fit))


Rows = tuple[Tensor, Tensor | None]  # assignments sorted by expert, and of E4M3 their scales
# The global scales of the weight are of experts [E] or of their rows [E, n]; its bias is not read.
Product = Callable[[Rows, ExpertWeight, Routing, torch.dtype], Tensor]


def large_dense(call: MoeCall) -> Tensor:
    """Grouped bfloat16 products of ``torch._grouped_mm``."""
    return _many(call, _bf16_product, fp8=False)


def large_fp8(call: MoeCall, tile: ManyConfig | None = None) -> Tensor:
    """Grouped FP8 products of :func:`.triton_many.moe_many_product`; tokens rounded to E4M3 per row."""
    c = tile or tile_for(call.assignments, call.chosen_from)

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
    from .triton_many import moe_many_in

    t, k = call.hidden.shape
    rows, scale = _rows(call, k, fp8)
    ids, table, table_size = ids_and_map(call)
    block, one_step, warps = whole_row(k)
    moe_many_in[(t,)](
        call.hidden, ids, call.expert_weights, table, routing.place, rows, scale, ids.shape[1], call.experts, table_size, k, E4M3_MAX,
        ON_INPUT=call.weight_on_input, HAS_MAP=table is not None, FP8=fp8, ONE_STEP=one_step, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return rows, scale


def activated_rows(call: MoeCall, routing: Routing, z: Tensor, fp8: bool) -> Rows:
    """act(z + bias) ``[T * k, I]`` of the first product. One launch."""
    from .triton_many import moe_many_between

    rows, scale = _rows(call, call.inner, fp8)
    ids, table, table_size = ids_and_map(call)
    block, one_step, warps = whole_row(call.inner)
    constants = activation(call)
    del constants["ON_INPUT"]
    moe_many_between[(call.assignments,)](
        z, routing.order, routing.ends, ids, table, call.gate_up.bias, rows, scale, call.experts, table_size, call.inner, E4M3_MAX,
        **constants, HAS_MAP=table is not None, HAS_BIAS=call.gate_up.bias is not None, FP8=fp8, ONE_STEP=one_step, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return rows, scale


def _in_parts(rows: Rows, weight: ExpertWeight, routing: Routing, dtype: torch.dtype, product: Product) -> Tensor:
    """``[T * k, n]``: by as many outputs of every expert at a time as :data:`TRANSIENT_BYTES` allow."""
    codes, scale, global_scale, meta = weight.qdata, weight.scale, weight.global_scale, weight.meta
    experts, n, groups = scale.shape
    step = part_of_rows(n, experts * groups * 16 * rows[0].element_size())
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
    from ..dequantize import launch as dequantize

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


def multiply_fp8(rows: Rows, w8: Tensor, global_scale: Tensor, routing: Routing, dtype: torch.dtype, tile: ManyConfig) -> Tensor:
    """``[T * k, n]`` of E4M3 rows and weights; ``routing`` for ``tile.block_m``. One launch."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from .triton_many import moe_many_product

    (x8, row_scale), (experts, n, k), slots = rows, w8.shape, routing.tile_expert.shape[0]
    out = torch.empty(x8.shape[0], n, dtype=dtype, device=x8.device)
    moe_many_product[(-(-n // tile.block_n) * slots,)](
        TensorDescriptor.from_tensor(x8, [tile.block_m, tile.block_k]), row_scale, routing.ends, routing.tile_expert, routing.tile_start,
        TensorDescriptor.from_tensor(w8.view(experts * n, k), [tile.block_n, tile.block_k]), global_scale, out, n, k, slots, 1.0 / WEIGHT_FACTOR,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=tile.group, EXACT=tile.exact, OF_ROWS=global_scale.dim() == 2,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return out


_GROUPED_FP8 = (
    "above 32 tokens an expert a pass that writes temporary FP8 weights (at most 1 GiB at once) pays: 2.6 million of them a "
    "microsecond, FP8 products at 0.6 to 1.1 PFLOPS"
)
_GROUPED_DENSE = "as the FP8 path, in bfloat16: at most 1 GiB of temporary weights at once"


def _kernels(op: str, sparse: str) -> tuple[Kernel, ...]:
    fp8, dense = Launches("moe.many:large_fp8"), Launches("moe.many:large_dense")
    unknown = (1, "not examined")
    return (
        Kernel(op, f"{sparse}dequantize_fp8 + triton_grouped_fp8", "large_fp8", (On(90, 90, MEASURED, _GROUPED_FP8),), BF16, FP8, batch=unknown, form=fp8),
        Kernel(op, f"{sparse}dequantize + grouped_mm", "large_dense", (On(80, 129, RIGHT, _GROUPED_DENSE),), BF16, n_multiple=16, batch=unknown, form=dense),
    )


KERNELS = (*_kernels("moe", ""), *_kernels("sparse_moe", "sparse_"))
