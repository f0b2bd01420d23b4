"""Dense NVFP4 linear layers against bf16 cuBLAS and the peers that can be imported, on this GPU.

    python benchmarks/dense.py                        # five shapes, M = 1 .. 8192, results/dense.csv
    python benchmarks/dense.py --m 1 64 --who fp4_inductor bf16 humming
    python benchmarks/dense.py --tune mid --m 64      # search the tiles of one of our kernels instead
    python benchmarks/dense.py --smoke                # seconds, on a CPU: does everything run?

``fp4_inductor`` is what a compiled graph calls, where kernels begin while the one before them is still running; ``fp4_inductor_eager`` the operator itself.
Cold L2, CUDA-graph replay, the lower of two medians (all M up, then down); ratios only between rows of one run. ``floor`` is what the hardware needs: the cold
read of the packed weight, or the products at the FP8 rate, whichever is longer (measured on an H200: FLOORS, FP8_FLOPS).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
from pathlib import Path

import numpy as np
import peers
import torch
import torch.nn.functional as F
from timing import copies_for, eager_us, graph_us, lower_of_two, machine, save, write_csv

from fp4_inductor.config import dispatch
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import csrc, host
from fp4_inductor.kernels.forms import Options
from fp4_inductor.kernels.select import arch_of

OURS = ("fp4_inductor", "fp4_inductor_eager")
SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (8192, 28672))  # (K, N)
SWEEP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 20, 24, 28, 32, 33, 40, 48, 56, 64, 65, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LARGE = (1024, 2048, 4096, 8192)
# Cold read of one tensor, launch included, on an H200: (bytes, us). Beyond the last, the streaming rate.
FLOORS = ((2e6, 2.49), (4e6, 2.91), (9e6, 4.05), (18e6, 5.86), (36e6, 9.95), (66e6, 16.97), (132e6, 32.03))
STREAM_TB_S, FP8_FLOPS = 4.58, 1380e12


def floor_us(k: int, n: int, m: int) -> float:
    """Microseconds below which no NVFP4 kernel on an H200 can be."""
    nbytes = n * k * 9 / 16
    last_bytes, last_us = FLOORS[-1]
    read = float(np.interp(nbytes, *zip(*FLOORS, strict=True))) + max(0.0, nbytes - last_bytes) / STREAM_TB_S / 1e6
    return max(read, 2.0 * m * n * k / FP8_FLOPS * 1e6) if nbytes <= last_bytes else max(last_us, read, 2.0 * m * n * k / FP8_FLOPS * 1e6)


def weights(n: int, k: int, count: int, device: str = "cuda"):
    """``count`` random NVFP4 weights: bytes are drawn directly, every code occurs."""
    q = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device=device)
    s = (torch.rand(count, n, k // 16, device=device) * 2 + 0.5).to(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37, device=device)


def reference(x, q, s, g):
    """float64 ``[M, N]`` of at most 64 rows."""
    return x[:64].double() @ nvfp4.dequantize(q, s, g, torch.float32).double().T


def error(y, r) -> float:
    """Relative Frobenius error of the rows that ``r`` has."""
    return float((y[: len(r)].double() - r).norm() / r.norm())


def measure(k: int, n: int, m_list: list[int], who: list[str], device: str, prefill: str = "auto") -> list[dict]:
    """Rows of one shape: every contender at every M, weights prepared once."""
    on_gpu = device == "cuda"
    time_us = graph_us if on_gpu else eager_us
    nbytes = n * k * 9 // 16
    count = copies_for(nbytes) if on_gpu else 2
    q, s, g = weights(n, k, count, device)
    rows: list[dict] = []
    for name in who:
        copies = min(count, copies_for(n * k * 2)) if on_gpu and name == "bf16" else count
        calls = contender(name, q, s, g, copies, prefill)
        xs = {m: torch.randn(m, k, device=device, dtype=torch.bfloat16) for m in m_list}
        timings = [lambda x=x, calls=calls: time_us(lambda i: calls[i](x), copies if len(x) <= 512 else min(copies, 8)) for x in xs.values()]
        for (m, x), us in zip(xs.items(), lower_of_two(timings), strict=True):
            kernel = host.row_for("linear", x, m, n, k, prefill).kernel if name in OURS else name
            e = error(calls[0](x), reference(x, q[0], s[0], g)) if name in (*OURS, *peers.EXACT) else float("nan")
            ratio = round(us / floor_us(k, n, m), 3) if "H200" in machine()["gpu"] else ""
            rows.append(dict(machine(), k=k, n=n, m=m, prefill=prefill, who=name, kernel=kernel, us=round(us, 2), floor_ratio=ratio, error=f"{e:.1e}"))
            print(f"K={k:5} N={n:5} M={m:5} {name:14} {kernel:26} {us:9.2f} us  floor x{ratio}  error {e:.1e}", flush=True)
        del calls, timings
        if on_gpu:
            torch.cuda.empty_cache()
    return rows


def in_a_graph(x, weight: tuple, g, prefill: str = "auto", op: str = "linear"):
    """What a compiled graph calls where it computed x itself: kernels that can begin while the one before them runs do. ``weight``: its parts."""
    row = host.row_for(op, x, len(x), weight[0].shape[0], x.shape[1], prefill)
    if not (row.library and row.library.early):
        return getattr(torch.ops.fp4, op)(x, *weight, g, None, prefill)
    parts = torch.ops.fp4.quantize_rows_fp8(x, row.library.lane_order) if row.library.fp8 else x
    return csrc.call(row.csrc, parts, weight, g, None, arch_of(x.device), Options(early=True))


def contender(name: str, q, s, g, copies: int, prefill: str):
    """``copies`` functions of x, each with a weight of its own."""
    if name == OURS[0]:
        return [functools.partial(in_a_graph, weight=(q[i], s[i]), g=g, prefill=prefill) for i in range(copies)]
    if name == OURS[1]:
        return [lambda x, i=i: torch.ops.fp4.linear(x, q[i], s[i], g, None, prefill) for i in range(copies)]
    if name == "bf16":
        dense = torch.randn(copies, q.shape[1], q.shape[2] * 2, device=q.device, dtype=torch.bfloat16)
        return [lambda x, w=w: F.linear(x, w) for w in dense]
    return [peers.PEERS[name](q[i], s[i], g) for i in range(copies)]


# --- tiles --------------------------------------------------------------------------------------------------------


def candidates(kind: str, m: int) -> list:
    from fp4_inductor.kernels.linear.gemv import GemvConfig
    from fp4_inductor.kernels.linear.mid import MidConfig

    if kind == "gemv":
        bm = 1 if m == 1 else 2 if m == 2 else 4
        wide = [(bn, bw, w) for bn in (2, 4, 8, 16, 32) for bw in (128, 256, 512) for w in (2, 4, 8)]
        return [GemvConfig(bm, bn, bw, w) for bn, bw, w in wide if 8 <= bn * bw / (32 * w) <= 64 / bm + 16]
    if kind == "small":
        extra = ((4, 8, 3),) if m <= 8 else () if m <= 16 else ((2, 8, 4), (4, 4, 3))
        return [csrc.tile("linear_small", *tile) for tile in ((2, 16, 2), (4, 8, 2), *extra)]
    bm = max(16, min(128, 1 << (m - 1).bit_length()))
    tiles = [(64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (32, 128), (32, 256)]
    found = [(bn, bk, w, st) for bn, bk in tiles for w in (4, 8) for st in (2, 3, 4)]
    return [MidConfig(bm, *c) for c in found if c[0] * bm <= 128 * 128 and not (c[2] == 8 and c[0] * bm < 4096)]


def run(kind, config, x, q, s, g):
    from fp4_inductor.kernels import run as kernels
    from fp4_inductor.kernels.linear import gemv, mid, small

    kernel = {"gemv": gemv, "small": small, "mid": mid}[kind].KERNELS[0]
    return kernels.by_form(kernel.form, x, (q, s, g), tile=config)


def _compile(job) -> str:
    kind, config, m, k, n = job
    q, s, g = weights(n, k, 1)
    try:
        run(kind, config, torch.randn(m, k, device="cuda", dtype=torch.bfloat16), q[0], s[0], g)
        torch.cuda.synchronize()
        return "ok"
    except Exception as failure:  # a candidate that does not fit is reported, not fatal
        return f"{config}: {str(failure)[:100]}"


def tune(kind: str, m_list: list[int], shapes, processes: int) -> list[dict]:
    """Time every candidate tile of one kernel; they are compiled in parallel processes first (Triton's disk cache)."""
    jobs = [(kind, c, m, k, n) for m in m_list for c in candidates(kind, m) for k, n in shapes[:1]]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        failed = {r for r in pool.map(_compile, jobs, chunksize=4) if r != "ok"}
    print(f"{len(jobs)} candidates, {len(failed)} failed", *sorted(failed)[:6], sep="\n  ", flush=True)
    rows = []
    for k, n in shapes:
        count = copies_for(n * k * 9 // 16)
        q, s, g = weights(n, k, count)
        for m in m_list:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            found = []
            for c in candidates(kind, m):
                try:
                    e = error(run(kind, c, x, q[0], s[0], g), reference(x, q[0], s[0], g))
                    found.append((graph_us(lambda i, c=c: run(kind, c, x, q[i], s[i], g), count, 7), e, c))
                except Exception:
                    continue
            found.sort(key=lambda f: f[0])
            print(f"K={k} N={n} M={m} worst error {max(f[1] for f in found):.1e}", *(f"  {us:7.2f} us {c}" for us, _, c in found[:4]), sep="\n", flush=True)
            rows += [dict(machine(), kind=kind, k=k, n=n, m=m, us=round(us, 2), error=f"{e:.1e}", config=str(c)) for us, e, c in found]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--m", type=int, nargs="+", help="rows of the activation; default: the sweep 1..512 and the large ones")
    parser.add_argument("--who", nargs="+", help=f"default: {', '.join(OURS)}, bf16 and every peer that can be imported")
    parser.add_argument("--prefill", default="auto", choices=("auto", "fp8", "bf16", "nvfp4"))
    parser.add_argument("--thresholds", nargs="+", default=[], metavar="REGIME=M", help="as DispatchConfig(thresholds=...)")
    parser.add_argument("--tune", choices=("gemv", "small", "mid"), help="search the tiles of one kernel instead")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        torch.set_num_threads(1)
        shapes, m_list, device = ((64, 96), (80, 48)), args.m or [1, 3, 33], "cpu"
    else:
        shapes, m_list, device = SHAPES, args.m or [*SWEEP, *LARGE], "cuda"
    if args.tune:
        rows = tune(args.tune, m_list, shapes, args.jobs)
        if args.out:
            write_csv(args.out, rows)
        return
    usable, missing = ({}, {}) if args.smoke else peers.available()
    for name, why in missing.items():
        print(f"peer {name} left out: {why}")
    who = [name for name in args.who or [*OURS, "bf16", *usable] if name not in missing]
    # Small M of every shape first: clocks fall behind large products.
    parts = [part for part in ([m for m in m_list if m <= 32], [m for m in m_list if 32 < m <= 512], [m for m in m_list if m > 512]) if part]
    with dispatch(thresholds={regime: int(m) for regime, m in (t.split("=") for t in args.thresholds)}):
        rows = [row for part in parts for k, n in shapes for row in measure(k, n, part, who, device, args.prefill)]
    rows.sort(key=lambda row: shapes.index((row["k"], row["n"])))
    save(rows, "dense.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
