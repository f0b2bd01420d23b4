"""Grouped FP8 products of the many-tokens path on a GPU: the library's, and every tile of the kernel: ``python benchmarks/many_products.py``.

Cold L2, CUDA-graph replay, medians; errors of some rows against float64 products of the same E4M3 operands. ``results/many_products.csv``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from moe import LAYERS, Case, packed
from timing import RESULTS, graph_us, machine, write_csv
from torch import Tensor

from fp4_inductor.kernels.moe import many, routing
from fp4_inductor.ops import dequantize_fp8

Tile = many.ManyConfig
TILES = (
    Tile(64, 128, 128, 4, 4), Tile(64, 256, 128, 8, 4), Tile(64, 256, 128, 4, 4), Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 4, 4), Tile(128, 256, 128, 8, 3),
    Tile(128, 256, 128, 8, 4), Tile(256, 128, 128, 8, 3), Tile(128, 256, 64, 8, 6), Tile(128, 256, 128, 8, 3, 4), Tile(128, 256, 128, 8, 3, 16), Tile(64, 128, 128, 4, 6),
    Tile(128, 128, 128, 8, 4, 8, 128), Tile(128, 256, 128, 8, 3, 8, 128), Tile(64, 128, 128, 4, 4, 8, 128),
)  # fmt: skip


def library(rows: many.Rows, w8: Tensor, g: Tensor, routing: routing.Routing, dtype: torch.dtype, fast: bool) -> Tensor:
    scale = (g.unsqueeze(1).expand(w8.shape[:2]) / dequantize_fp8.WEIGHT_FACTOR).contiguous()
    return torch._scaled_grouped_mm(rows[0], w8.mT, rows[1], scale, offs=routing.ends, out_dtype=dtype, use_fast_accum=fast)


def products(layer, tokens: int, only: tuple[str, ...]) -> Iterator[dict]:
    parts = packed(layer, "cuda")
    case = Case(layer, parts, tokens, "cuda")
    calls = [case.call(i) for i in range(2)]
    dtype = case.dtype
    routings = {m: [routing.route(c, m) for c in calls] for m in (64, 128, 256)}
    x = [many.sorted_rows(c, r, True) for c, r in zip(calls, routings[64], strict=True)]
    for name in only:
        weight = getattr(calls[0], name)
        w8 = [many.transient_fp8(weight, routings[64][0].ends) for _ in range(2)]
        rows = x
        if name == "down":
            z = torch.randn(calls[0].assignments, 2 * layer.inner, device="cuda").to(dtype)
            rows = [many.activated_rows(c, r, z, True) for c, r in zip(calls, routings[64], strict=True)]
        g = weight.global_scale
        some = min(48, int(routings[64][0].ends[0]))
        want = (rows[0][0][:some].double() @ w8[0][0].double().T) * (rows[0][1][:some, None] * g[0] / dequantize_fp8.WEIGHT_FACTOR).double()

        def timed(what: str, f: Callable[[int], Tensor], want=want, some=some, name=name, rows=rows, w8=w8) -> dict:
            y = f(0)
            error = float((y[:some].double() - want).norm() / want.norm())
            us = graph_us(f, 2, 5)
            n, k = w8[0].shape[1:]
            note = f"error {error:.1e}  {2e-6 * calls[0].assignments * n * k / us:.0f} TFLOPS  weights {w8[0].numel() / us / 1e6:.2f} TB/s"
            return dict(layer=layer.name, tokens=tokens, product=name, what=what, us=round(us, 2), note=note)

        for fast in (False, True):
            yield timed(f"library fast {fast}", lambda i, fast=fast, rows=rows, w8=w8, g=g: library(rows[i], w8[i], g, routings[64][i], dtype, fast))
        for tile in TILES:
            try:
                yield timed(str(tile), lambda i, t=tile, rows=rows, w8=w8, g=g: many.multiply_fp8(rows[i], w8[i], g, routings[t.block_m][i], dtype, t))
            except Exception as error:  # a tile that does not fit
                print(layer.name, tile, type(error).__name__, str(error)[:200], flush=True)


def dense() -> Iterator[dict]:
    n = k = 8192
    w8 = [torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(4)]
    b = torch.rand(1, n, device="cuda")
    for m in (128, 512, 4096):
        x8, a = torch.ops.fp4.quantize_rows_fp8(torch.randn(m, k, device="cuda").to(torch.bfloat16))
        want = (x8[:64].double() @ w8[0].double().T) * a[:64].double() * b.double()
        for fast in (False, True):

            def call(i, fast=fast, x8=x8, a=a):
                return torch._scaled_mm(x8, w8[i].t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16, use_fast_accum=fast)

            error = float((call(0)[:64].double() - want).norm() / want.norm())
            yield dict(
                layer="dense 8192x8192", tokens=m, product="", what=f"scaled_mm fast {fast}", us=round(graph_us(call, 4, 7), 2), note=f"error {error:.1e}"
            )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS / "many_products.csv")
    args = parser.parse_args()
    torch.manual_seed(0)
    by_name = {layer.name: layer for layer in LAYERS}
    both = ("gate_up", "down")
    cases = [
        ("qwen3_30b", 512, both),
        ("qwen3_30b", 4096, both),
        ("qwen3_next", 4096, ("gate_up",)),
        ("gpt_oss", 4096, ("gate_up",)),
        ("gpt_oss", 256, ("down",)),
    ]
    cases += [("mixtral", 128, ("gate_up",)), ("mixtral", 1024, ("down",)), ("mixtral", 4096, both)]
    rows = []
    for part in (*(products(by_name[name], t, only) for name, t, only in cases), dense()):
        for row in part:
            rows.append(dict(machine(), **row))
            print(f"{row['layer']:12} T={row['tokens']:5} {row['product']:8} {row['what']:118} {row['us']:9.2f} us  {row['note']}", flush=True)
        torch.cuda.empty_cache()
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
