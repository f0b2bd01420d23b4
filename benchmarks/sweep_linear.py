"""Search the tiles of fp4.linear's Triton kernels on this GPU: ``python benchmarks/sweep_linear.py gemv|small|mid [--out CSV]``.

Compiles the candidates in parallel processes first (Triton's disk cache), then times each with a cold L2.
"""

from __future__ import annotations

import argparse
import multiprocessing
from pathlib import Path

import torch
from timing import copies_for, graph_us, machine, write_csv

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels.linear import configs, launch

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))


def weights(n: int, k: int, count: int):
    """Random NVFP4 weights: bytes are drawn directly, every code occurs."""
    q = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device="cuda")
    s = torch.randint(0x30, 0x48, (count, n, k // 16), dtype=torch.uint8, device="cuda").view(nvfp4.SCALE_DTYPE)
    return q, s, torch.full((), 2.0**-8, device="cuda")


def reference(x, q, s, g):
    return x.double() @ nvfp4.dequantize(q, s, g, torch.float32).double().T


def error(y, r) -> float:
    return ((y.double() - r).norm() / r.norm()).item()


def gemv_candidates(m):
    bm = 1 if m == 1 else 2 if m == 2 else 4
    return [
        configs.GemvConfig(bm, bn, bw, w) for bn in (2, 4, 8, 16, 32) for bw in (128, 256, 512) for w in (2, 4, 8) if 8 <= bn * bw / (32 * w) <= 64 / bm + 16
    ]


def mid_candidates(m):
    bm = max(16, min(128, 1 << (m - 1).bit_length()))
    tiles = [(64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (32, 128), (32, 256)]
    return [
        configs.MidConfig(bm, bn, bk, w, st) for bn, bk in tiles for w in (4, 8) for st in (2, 3, 4) if bn * bm <= 128 * 128 and not (w == 8 and bn * bm < 4096)
    ]


def small_candidates(m):
    extra = ((4, 8, 3),) if m <= 8 else () if m <= 16 else ((2, 8, 4), (4, 4, 3))
    return [configs.SmallConfig(*tile) for tile in ((2, 16, 2), (4, 8, 2), *extra)]


def run(kind, config, x, q, s, g):
    return getattr(launch, kind)(x, q, s, g, None, config)


def _compile(job) -> str:
    kind, config, m, k, n = job
    q, s, g = weights(n, k, 1)
    try:
        run(kind, config, torch.randn(m, k, device="cuda", dtype=torch.bfloat16), q[0], s[0], g)
        torch.cuda.synchronize()
        return "ok"
    except Exception as failure:  # a candidate that does not fit is reported, not fatal
        return f"{config}: {str(failure)[:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("gemv", "small", "mid"))
    parser.add_argument("--m", type=int, nargs="+", required=True)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    candidates = {"gemv": gemv_candidates, "small": small_candidates, "mid": mid_candidates}[args.kind]
    jobs = [(args.kind, c, m, k, n) for m in args.m for c in candidates(m) for k, n in SHAPES[:1]]
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        failed = {r for r in pool.map(_compile, jobs, chunksize=4) if r != "ok"}
    print(f"{len(jobs)} candidates, {len(failed)} failed", *sorted(failed)[:6], sep="\n  ", flush=True)
    rows = []
    for k, n in SHAPES:
        count = copies_for(n * k * 9 // 16)
        q, s, g = weights(n, k, count)
        for m in args.m:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            r = reference(x, q[0], s[0], g)
            found = []
            for c in candidates(m):
                try:
                    e = error(run(args.kind, c, x, q[0], s[0], g), r)
                    found.append((graph_us(lambda i, c=c: run(args.kind, c, x, q[i], s[i], g), count, 7), e, c))
                except Exception:
                    continue
            found.sort(key=lambda f: f[0])
            worst = max(f[1] for f in found)
            print(f"K={k} N={n} M={m} worst error {worst:.1e}", *(f"  {us:7.2f} us {c}" for us, _, c in found[:4]), sep="\n", flush=True)
            rows += [dict(machine(), kind=args.kind, k=k, n=n, m=m, us=round(us, 2), error=f"{e:.1e}", config=str(c)) for us, e, c in found]
    if args.out:
        write_csv(args.out, rows)


if __name__ == "__main__":
    main()
