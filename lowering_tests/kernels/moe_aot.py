"""Compile the MoE kernels ahead of time with the tiles and constants that the launcher would give them."""

from __future__ import annotations

import torch

from fp4_inductor.kernels.moe import decode, grouped, many, routing
from fp4_inductor.kernels.moe.triton_decode import moe_decode_down, moe_decode_up
from fp4_inductor.kernels.moe.triton_grouped import moe_combine, moe_grouped_down, moe_grouped_up
from fp4_inductor.kernels.moe.triton_many import moe_many_between, moe_many_in, moe_many_product
from fp4_inductor.kernels.moe.triton_route import moe_route
from fp4_inductor.ops.activation import Activation
from lowering_tests.kernels import aot

# (H, I, E, k): the layers of the benchmark
LAYERS = {"qwen3_30b": (2048, 768, 128, 8), "qwen3_next": (2048, 512, 512, 10), "mixtral": (4096, 14336, 8, 2), "gpt_oss": (2880, 2880, 32, 4)}
POINTERS = {
    "X": "*{d}", "IDS": "*i64", "WEIGHTS": "*fp32", "MAP": "*i32", "CODES": "*u8", "META": "*u8",
    "SCALE": "*u8", "GLOBAL_SCALE": "*fp32", "BIAS": "*{d}", "Y": "*{d}", "FACTOR": "*fp32",
    "ORDER": "*i32", "PLACE": "*i32", "ENDS": "*i32", "TILE_EXPERT": "*i32", "TILE_START": "*i32", "OUT": "*fp32",
    "Z": "*{d}", "ROW_SCALE": "*fp32", "E4M3_MAX": "fp32",
}  # fmt: skip
SILU = Activation()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def activation(act: Activation, gated: bool) -> dict[str, object]:
    return dict(ALPHA=act.alpha, LIMIT=act.limit or 0.0, ACT=act.name, GATED=gated, INTERLEAVED=act.interleaved)


def compile_kernel(kernel, constants: dict, cc: int, layer: str, dtype: str = "bf16", warps: int = 4, stages: int = 3, **pointers: str) -> aot.Compiled:
    h, inner, experts, k = LAYERS[layer]
    words = {
        "K": h if kernel in (moe_grouped_up, moe_many_in) else inner,
        "INNER": inner,
        "N": h,
        "E": experts,
        "TOP_K": k,
    }
    absent = {"MAP": None} if not constants.get("HAS_MAP", True) else {}
    absent |= {"META": None} if not constants.get("SPARSE", True) else {}
    absent |= {"BIAS": None} if not constants.get("HAS_BIAS", True) else {}
    absent |= {"PLACE": None} if not constants.get("SORTED", True) else {}
    absent |= {"ROW_SCALE": None} if not constants.get("FP8", True) else {}
    constants = {**constants, **absent}
    types = {**{n: t.format(d=dtype) for n, t in POINTERS.items()}, **pointers}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    aligned = tuple(n for n in signature if types.get(n, "").startswith("*") or words.get(n, 1) % 16 == 0)
    return aot.compile_kernel(kernel, signature, constants, cc, warps, stages, aligned)


def decode_up(
    cc: int, layer: str, act: Activation = SILU, *, gated: bool = True, biased: bool = False, mapped: bool = False, dtype: str = "bf16",
    sparse: bool = False, tokens: int = 1, two: bool = False,
):  # fmt: skip
    h, inner = LAYERS[layer][:2]
    c = decode.up_tile(h, tokens)
    constants = {
        **activation(act, gated),
        "TWO": two,
        "INNER": inner,
        "ON_INPUT": False,
        "HAS_MAP": mapped,
        "HAS_BIAS": biased,
        "SPARSE_DOWN": sparse,
        **decode.constants_of(c, inner, h, cc, sparse),
    }
    return compile_kernel(moe_decode_up, constants, cc, layer, dtype, c.num_warps, H="*fp16"), c.num_warps


def decode_down(cc: int, layer: str, *, biased: bool = False, mapped: bool = False, dtype: str = "bf16", sparse: bool = False, tokens: int = 1):
    h, inner, _, k = LAYERS[layer]
    c = decode.down_tile(inner, k, tokens)
    constants = {
        "TOP_K": k,
        "ON_INPUT": False,
        "HAS_MAP": mapped,
        "HAS_BIAS": biased,
        **decode.constants_of(c, h, inner, cc, sparse),
    }
    return compile_kernel(moe_decode_down, constants, cc, layer, dtype, c.num_warps, H="*fp16"), c.num_warps


def grouped_up(
    cc: int, layer: str, pairs: int, act: Activation = SILU, *, gated: bool = True, biased: bool = False, dtype: str = "bf16", sparse: bool = False,
    two: bool = False,
):  # fmt: skip
    c = grouped.tile_for(pairs, LAYERS[layer][2], gated)
    constants = {**activation(act, gated), "ON_INPUT": False, "HAS_BIAS": biased, "TWO": two, **grouped.constants_of(c, DTYPES[dtype], sparse)}
    return compile_kernel(moe_grouped_up, constants, cc, layer, dtype, c.num_warps, c.num_stages, H=f"*{dtype}"), c.num_warps


def grouped_down(cc: int, layer: str, pairs: int, *, gated: bool = True, biased: bool = False, dtype: str = "bf16", sparse: bool = False):
    c = grouped.tile_for(pairs, LAYERS[layer][2], gated)
    constants = {"HAS_BIAS": biased, **grouped.constants_of(c, DTYPES[dtype], sparse)}
    return compile_kernel(moe_grouped_down, constants, cc, layer, dtype, c.num_warps, c.num_stages, H=f"*{dtype}"), c.num_warps


def route(cc: int, mapped: bool = False, pairs: int = 1024):
    c = routing.route_tile(pairs)
    constants = {"BLOCK_M": 16, "HAS_MAP": mapped, "BLOCK": c["BLOCK"]}
    return compile_kernel(moe_route, constants, cc, "qwen3_30b", warps=c["num_warps"]), c["num_warps"]


def combine(cc: int, is_sorted: bool = False):
    constants = {"TOP_K": 8, "ON_INPUT": False, "HAS_MAP": False, "SORTED": is_sorted, "HAS_BIAS": is_sorted, "BLOCK_N": routing.COMBINE_BLOCK}
    return compile_kernel(moe_combine, constants, cc, "qwen3_30b"), 4


def many_in(cc: int, layer: str, fp8: bool, on_input: bool = False):
    block, one_step, warps = many.whole_row(LAYERS[layer][0])
    constants = {"ON_INPUT": on_input, "HAS_MAP": False, "FP8": fp8, "ONE_STEP": one_step, "BLOCK": block}
    return compile_kernel(moe_many_in, constants, cc, layer, warps=warps, OUT="*fp8e4nv" if fp8 else "*bf16"), warps


def many_between(cc: int, layer: str, fp8: bool, act: Activation = SILU, *, gated: bool = True, biased: bool = False):
    block, one_step, warps = many.whole_row(LAYERS[layer][1])
    constants = {**activation(act, gated), "HAS_MAP": False, "HAS_BIAS": biased, "FP8": fp8, "ONE_STEP": one_step, "BLOCK": block}
    return compile_kernel(moe_many_between, constants, cc, layer, warps=warps, H="*fp8e4nv" if fp8 else "*bf16"), warps


def many_product(cc: int, layer: str, pairs: int, of_rows: bool = False):
    c = many.tile_for(pairs, LAYERS[layer][2])
    constants = dict(BLOCK_M=c.block_m, BLOCK_N=c.block_n, BLOCK_K=c.block_k, GROUP=c.group, EXACT=c.exact, OF_ROWS=of_rows)
    tiles = {"ROWS": f"tensordesc<fp8e4nv[{c.block_m},{c.block_k}]>", "WEIGHT": f"tensordesc<fp8e4nv[{c.block_n},{c.block_k}]>"}
    return compile_kernel(
        moe_many_product, constants, cc, layer, warps=c.num_warps, stages=c.num_stages, OUT="*bf16", INVERSE_FACTOR="fp32", **tiles
    ), c.num_warps
