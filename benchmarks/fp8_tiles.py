"""Every tile of the FP8 products that decode weights in registers, dense and 2:4-sparse, rounding of activations included.

    python benchmarks/fp8_tiles.py                     # on a GPU with sm_90: two minutes
    python benchmarks/fp8_tiles.py --kinds dense --m 192 256 384

The costs by which ``best_tile`` (csrc/gemm/multiply_fp8.cuh) chooses are fitted to these figures. ``what``: ``fp8 TOKENS,SPLITS`` (0: equal
shares), ``auto`` (the operator as users call it), or ``bf16`` (cuBLAS). A product begins while the kernel that rounds is running, as it does for users.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import dense
import sparse
import torch
from timing import RESULTS, copies_for, graph_us, machine

from fp4_inductor.kernels import csrc
from fp4_inductor.kernels.forms import Options
from fp4_inductor.kernels.linear import wide_fp8
from fp4_inductor.kernels.sparse_linear import wide_fp8 as sparse_wide_fp8

ARCH = 90
SHAPES = [(4096, 4096), (4096, 6144), (4096, 14336), (8192, 8192), (14336, 4096), (8192, 28672)]
ROWS = (64, 96, 128, 136, 192, 256, 320, 384, 448, 512, 576, 768, 1024, 1536, 2048, 4096, 8192)
FIELDS = ("gpu", "torch", "triton", "commit", "date", "kind", "k", "n", "m", "what", "us")
LIBRARIES = {"dense": wide_fp8.LIBRARY.name, "sparse": sparse_wide_fp8.LIBRARY.name}


def tiles(m: int) -> list[tuple[int, int]]:
    """(tokens, splits) worth a look: small tiles only for few rows, split K only where tiles are few."""
    return [(t, s) for t in (64, 128, 192, 256) for s in (1, 2, 4, 0) if (t > 64 or m <= 192) and (m <= 576 or (t > 128 and s < 2))]


def main(args: argparse.Namespace) -> None:
    facts = machine()
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for kind in args.kinds:
            for k, n in SHAPES:
                count = min(copies_for(n * k * 9 // 16), 24)
                parts = (dense.weights if kind == "dense" else sparse.sparse_weights)(n, k, count, "cuda")
                *weight, scale = parts
                w16 = torch.randn(min(6, copies_for(n * k * 2)), n, k, device="cuda", dtype=torch.bfloat16)
                op = torch.ops.fp4.linear if kind == "dense" else torch.ops.fp4.sparse_linear
                for m in (m for m in args.m if m > 128 or n * k >= 2**25):
                    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                    copies = count if m <= 512 else min(count, 8) if m <= 2048 else 3

                    def by(i, tile, x=x, kind=kind, weight=weight, scale=scale):
                        rows = torch.ops.fp4.quantize_rows_fp8(x, kind == "dense")
                        return csrc.call(LIBRARIES[kind], rows, [part[i] for part in weight], scale, None, ARCH, Options(tile, early=True))

                    calls = {"bf16": lambda i, x=x, w16=w16: torch.nn.functional.linear(x, w16[i % len(w16)])}
                    calls["auto"] = lambda i, x=x, op=op, weight=weight, scale=scale: op(x, *(part[i] for part in weight), scale)
                    calls |= {f"fp8 {tile[0]},{tile[1]}": lambda i, tile=tile, by=by: by(i, tile) for tile in tiles(m)}
                    found = {}
                    for what, call in calls.items():
                        try:
                            found[what] = round(graph_us(call, copies, 5 if m > 512 else 7), 2)
                        except (RuntimeError, ValueError):  # not a tile for this shape: clusters that split K must all run at once
                            continue
                        writer.writerow(dict(facts, kind=kind, k=k, n=n, m=m, what=what, us=found[what]))
                        file.flush()
                    best = sorted((us, what) for what, us in found.items() if what.startswith("fp8"))[:3]
                    print(f"{kind} K={k} N={n} M={m}: bf16 {found['bf16']} auto {found['auto']} | {best}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES))
    parser.add_argument("--m", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--out", type=Path, default=RESULTS / "wide_fp8.csv")
    main(parser.parse_args())
