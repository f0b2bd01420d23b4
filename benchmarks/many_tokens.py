"""The many-tokens paths stage by stage on a GPU: ``python benchmarks/many_tokens.py [--layers mixtral] [--no-dequantize]``.

First the transient weights alone (every dtype, dense and 2:4) against the bytes they move, then fp4.moe's grouped kernel against grouped
products of transient weights for 8 to 128 tokens an expert, with the time of each launch. Cold L2, CUDA-graph replay, medians; results are
compared with the contracts. Written to ``results/many_tokens.csv``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from moe import LAYERS, Case, Layer, packed
from timing import RESULTS, copies_for, graph_us, machine, write_csv
from torch import Tensor

import fp4_inductor  # noqa: F401
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels.dequantize import launch as dequantize
from fp4_inductor.kernels.moe import grouped, many, routing
from fp4_inductor.ops import dequantize_fp8
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.moe_call import MoeCall

SHAPES = ((8192, 8192), (28672, 8192))
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
TOKENS_AN_EXPERT = (8, 16, 32, 64, 128)
TOKENS = (128, 1024, 4096)
FEW = 16  # tokens whose results are compared


def weight(n: int, k: int, sparse: bool) -> tuple[Tensor, ...]:
    """Every code, legal patterns, every scale."""
    *codes, scale, g = packed(Layer("", 1, 1, k, n // 2), "cuda", sparse)[0]
    scale = torch.randint(0, 0x7F, scale.shape, dtype=torch.uint8, device="cuda").view(nvfp4.SCALE_DTYPE)
    return tuple(t[0] for t in (*codes, scale, g))


def reference(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    codes = parts[0] if len(parts) == 3 else sparse24.decompress(parts[0], parts[1])
    if dtype == torch.float8_e4m3fn:
        return dequantize_fp8.reference(codes, parts[-2])
    return nvfp4.dequantize(codes, *parts[-2:], dtype)


def weights_alone() -> Iterator[dict]:
    for n, k in SHAPES:
        for sparse in (False, True):
            for dtype in DTYPES:
                read = n * k * (0.375 if sparse else 0.5) + n * k / 16
                copies = [weight(n, k, sparse) for _ in range(copies_for(int(read), 256 << 20))]

                def call(i, copies=copies, dtype=dtype):
                    *codes, scale, g = copies[i]
                    return dequantize.transient(tuple(codes), scale, None if dtype == torch.float8_e4m3fn else g, dtype)

                rows = slice(n - 512, n)
                some = tuple(t[rows] if t.dim() else t for t in copies[0])
                raw = torch.int32 if dtype == torch.float32 else torch.uint8
                wrong = int((call(0)[rows].view(raw) != reference(some, dtype).view(raw)).sum())
                us = graph_us(call, len(copies), 7)
                rate = (read + n * k * dtype.itemsize) / us / 1e6
                yield dict(
                    stage="dequantize",
                    layer=f"{n}x{k}",
                    weights="2:4" if sparse else "dense",
                    what=str(dtype)[6:],
                    us=us,
                    note=f"{rate:.2f} TB/s, {wrong} bytes differ",
                )
                del copies


def dense_linear() -> Iterator[dict]:
    """fp4.linear's FP8 path, and its parts."""
    n, k = SHAPES[0]
    copies = [weight(n, k, False) for _ in range(8)]
    w8 = [dequantize_fp8_of(c) for c in copies]
    g = torch.ones((), device="cuda")
    for m in (128, 512):
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        x8, x_scale = torch.ops.fp4.quantize_rows_fp8(x)
        for what, call in (
            ("fp4.linear, prefill fp8", lambda i, x=x: torch.ops.fp4.linear(x, *copies[i], None, "fp8")),
            ("quantize_rows_fp8", lambda i, x=x: torch.ops.fp4.quantize_rows_fp8(x)),
            ("scaled_mm", lambda i, x8=x8, s=x_scale: dequantize_fp8.scaled_product(x8, s, w8[i], g, torch.bfloat16)),
        ):
            yield dict(stage="linear", layer=f"{n}x{k}", weights="dense", what=f"M={m} {what}", us=graph_us(call, len(copies), 7), note="")


def dequantize_fp8_of(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.ops.fp4.dequantize_fp8(parts[0], parts[1])


def few(case: Case) -> Tensor:
    """float64 results of the first tokens."""
    call = case.call(0)
    first = replace(call, hidden=case.x[:FEW].float(), expert_ids=call.expert_ids[:FEW], expert_weights=call.expert_weights[:FEW])
    return contract.reference(first).double()


def stages(calls: list[MoeCall]) -> Iterator[tuple[str, float]]:
    """Microseconds of every launch of the FP8 path; what it works on comes from the call before."""
    tile = many.tile_for(calls[0].assignments, calls[0].experts)
    routings = [routing.route(c, tile.block_m) for c in calls]
    x = [many.sorted_rows(c, r, True) for c, r in zip(calls, routings, strict=True)]
    dtype, count = calls[0].hidden.dtype, len(calls)
    each = list(zip(calls, routings, x, strict=True))

    def weights(i, parts):
        return many.transient_fp8(parts, routings[i].ends)

    def multiply(i, rows, w8, g):
        return many.multiply_fp8(rows[i], w8, g, routings[i], dtype, tile)

    up, up_scale = weights(0, calls[0].gate_up), calls[0].gate_up.global_scale
    z = multiply(0, x, up, up_scale)
    h = [many.activated_rows(c, r, z, True) for c, r in zip(calls, routings, strict=True)]
    down, down_scale = weights(0, calls[0].down), calls[0].down.global_scale
    y = multiply(0, h, down, down_scale)
    yield "route", graph_us(lambda i: routing.route(calls[i], tile.block_m), count, 7)
    yield "sorted_rows", graph_us(lambda i: many.sorted_rows(*each[i][:2], True), count, 7)
    yield "dequantize gate_up", graph_us(lambda i: weights(i, calls[i].gate_up), count, 7)
    yield "multiply gate_up", graph_us(lambda i: multiply(i, x, up, up_scale), count, 7)
    yield "activated_rows", graph_us(lambda i: many.activated_rows(*each[i][:2], z, True), count, 7)
    yield "dequantize down", graph_us(lambda i: weights(i, calls[i].down), count, 7)
    yield "multiply down", graph_us(lambda i: multiply(i, h, down, down_scale), count, 7)
    yield "combine", graph_us(lambda i: routing.combine(calls[i], y, routings[i].place, calls[i].down.bias), count, 7)


def layers(chosen: list[Layer]) -> Iterator[dict]:
    for layer in chosen:
        parts = packed(layer, "cuda")
        tokens = {t: "" for t in TOKENS} | {a * layer.experts // layer.top_k: "" for a in TOKENS_AN_EXPERT}
        for t in sorted(tokens):
            each = t * layer.top_k / layer.experts
            case = Case(layer, parts, t, "cuda")
            calls = [case.call(i) for i in range(4)]
            paths = {"large_fp8": many.large_fp8, "large_dense": many.large_dense} | ({"grouped": grouped.grouped} if each <= 65 else {})
            paths |= {"grouped, tile 64": lambda c: grouped.grouped(c, grouped.GroupedConfig(64, 64, 64, 4, 3))} if each < 25 else {}
            paths |= {"large_fp8, tile 64": lambda c: many.large_fp8(c, many.ManyConfig(64, 128, 128, 4, 4))} if 48 < each <= 129 else {}
            want = few(case) if t in TOKENS else None
            for name, f in paths.items():
                if name == "large_dense" and t != TOKENS[-1]:
                    continue
                error = float("nan") if want is None else float((f(calls[0])[:FEW].double() - want).norm() / want.norm())
                us = graph_us(lambda i, f=f, c=calls: f(c[i]), 4, 7)
                yield dict(stage="moe", layer=layer.name, weights="dense", what=f"T={t} {each:.0f} an expert {name}", us=us, note=f"error {error:.1e}")
            if t == TOKENS[-1] or 24 <= each <= 40:
                for name, us in stages(calls):
                    yield dict(stage="moe stage", layer=layer.name, weights="dense", what=f"T={t} {name}", us=us, note="")
            del case, calls
        del parts
        torch.cuda.empty_cache()


def sparse_layer(layer: Layer) -> Iterator[dict]:
    case = Case(layer, packed(layer, "cuda", sparse=True), TOKENS[-1], "cuda")
    calls = [case.call(i) for i in range(4)]
    error = case.error(many.large_fp8(calls[0]))
    us = graph_us(lambda i: many.large_fp8(calls[i]), 4, 7)
    yield dict(stage="moe", layer=layer.name, weights="2:4", what=f"T={TOKENS[-1]} large_fp8", us=us, note=f"error {error:.1e}")


def in_parts(layer: Layer) -> Iterator[dict]:
    """The same result with a tenth of the transient memory."""
    case = Case(layer, packed(layer, "cuda"), 1024, "cuda")
    call = case.call(0)
    whole, kept = many.large_fp8(call), many.TRANSIENT_BYTES
    many.TRANSIENT_BYTES = kept // 10
    try:
        same = torch.equal(many.large_fp8(call), whole)
        us = graph_us(lambda i: many.large_fp8(call), 1, 7)
    finally:
        many.TRANSIENT_BYTES = kept
    yield dict(stage="moe", layer=layer.name, weights="dense", what="T=1024 large_fp8, a tenth of the memory", us=us, note=f"bit-equal {same}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="*", default=[layer.name for layer in LAYERS], choices=[layer.name for layer in LAYERS])
    parser.add_argument("--no-dequantize", dest="alone", action="store_false")
    parser.add_argument("--out", type=Path, default=RESULTS / "many_tokens.csv")
    args = parser.parse_args()
    torch.manual_seed(0)
    chosen = [layer for layer in LAYERS if layer.name in args.layers]
    parts = ([weights_alone(), dense_linear()] if args.alone else []) + [layers(chosen)]
    parts += [f(layer) for layer in chosen if layer.name == "qwen3_30b" for f in (sparse_layer, in_parts)]
    rows = []
    for part in parts:
        try:
            for row in part:
                row = dict(machine(), **row | {"us": round(row["us"], 2)})
                print(f"{row['stage']:10} {row['layer']:12} {row['weights']:6} {row['what']:44} {row['us']:10.2f} us  {row['note']}", flush=True)
                rows.append(row)
        except Exception as error:  # the other parts still tell something
            print(f"{type(error).__name__}: {str(error)[:600]}", flush=True)
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
