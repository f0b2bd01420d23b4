"""fp4.linear against bf16 cuBLAS on this GPU: ``python benchmarks/linear.py [--m 1 16 ...] [--out CSV]``.

Cold L2, CUDA-graph replay, medians; the kernel is the one that ``select`` gives for each M (eager op inside the graph).
``floor_ratio`` is the time over the cold read of the packed weight (interpolated in data measured on an H200: FLOORS).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sweep_linear import SHAPES, error, reference, weights
from timing import RESULTS, copies_for, graph_us, machine, write_csv

from fp4_inductor.config import dispatch_config
from fp4_inductor.kernels.linear.launch import call_of
from fp4_inductor.kernels.select import plan

# Cold read of one tensor, launch included, on an H200: (bytes, us).
FLOORS = ((2e6, 2.49), (4e6, 2.91), (9e6, 4.05), (18e6, 5.86), (36e6, 9.95), (66e6, 16.97), (132e6, 32.03))


def floor_us(nbytes: float) -> float:
    """Interpolated cold-read time of ``nbytes``."""
    return float(np.interp(nbytes, *zip(*FLOORS, strict=True)))


def measure(k: int, n: int, m: int, large_m: str = "auto") -> dict:
    """One row: microseconds of the quantized call and of bf16 F.linear, and the error against float64."""
    nbytes = n * k * 9 // 16
    count = copies_for(nbytes)
    q, s, g = weights(n, k, count)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = torch.ops.fp4.linear(x, q[0], s[0], g, None, large_m)
    rows = slice(0, min(m, 64))
    e = error(y[rows], reference(x[rows], q[0], s[0], g))
    us = graph_us(lambda i: torch.ops.fp4.linear(x, q[i], s[i], g, None, large_m), count if m <= 512 else min(count, 8))
    dense = torch.randn(copies_for(n * k * 2), n, k, device="cuda", dtype=torch.bfloat16)
    bf16 = graph_us(lambda i: torch.nn.functional.linear(x, dense[i]), len(dense))
    row = plan(call_of(x, q[0], large_m), dispatch_config()).pick(m)
    return dict(
        machine(),
        k=k,
        n=n,
        m=m,
        large_m=large_m,
        kernel=row.kernel,
        us=round(us, 2),
        floor_ratio=round(us / floor_us(nbytes), 2),
        bf16_us=round(bf16, 2),
        speedup=round(bf16 / us, 2),
        error=f"{e:.1e}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--out", type=Path, default=RESULTS / "linear.csv")
    args = parser.parse_args()
    rows = []
    for k, n in SHAPES:
        for m in args.m:
            rows.append(measure(k, n, m))
            r = rows[-1]
            print(f"K={k:5} N={n:5} M={m:5} {r['kernel']:26} {r['us']:8.2f} us  bf16 {r['bf16_us']:8.2f}  x{r['speedup']:.2f}  error {r['error']}", flush=True)
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
