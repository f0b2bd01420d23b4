"""Check and time every kernel that is off by default on this GPU, in one call: ``python benchmarks/candidates.py [--m ...] [--out CSV]``.

Each candidate against float64, against the row that serves the call today, and against bf16 cuBLAS; cold L2, CUDA-graph replay, medians.
A candidate that is wrong is printed as WRONG and not timed. ``--quick``: two shapes. ``--only sparse`` and so on: one kind.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from dense import SHAPES, error, floor_us, reference, weights
from sparse import reference as sparse_reference
from sparse import sparse_weights
from timing import RESULTS, copies_for, eager_us, graph_us, machine, write_csv

from fp4_inductor import dispatch
from fp4_inductor.kernels import csrc, host, registry, run
from fp4_inductor.kernels.forms import Epilogue, Options, Problem
from fp4_inductor.kernels.linear_w4a4 import block_scaled, mma_sync
from fp4_inductor.kernels.linear_w4a4 import cuda as cuda_w4a4
from fp4_inductor.kernels.sparse_linear import small as sparse_small
from fp4_inductor.kernels.sparse_linear import table as sparse_table
from fp4_inductor.ops import linear_glu, linear_siblings, quantize_rows_nvfp4

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512)
KINDS = ("current", "gemv", "small", "table", "early", "siblings", "epilogue", "any_k", "wide", "sparse", "w4a4")
BOUND = 4e-3  # bf16: one rounding of the result
TODAY, FP8_BOUND = ("current", "glu apart", "residual apart"), 15  # what serves the call today rounds more often, and on the FP8 path more coarsely


def small_tiles(m: int) -> Iterator[tuple[int, ...] | None]:
    yield None  # the kernel's own choice
    if m <= 32:
        yield from (
            csrc.tile("linear_small", *t) for t in ((2, 16, 2), (4, 8, 2), *([(4, 8, 3)] if m <= 8 else []), *([(2, 8, 4), (4, 4, 3)] if m > 16 else []))
        )


def gemv_tiles() -> Iterator[tuple[int, ...] | None]:
    """Those with at least 36 KB of weights in flight on a multiprocessor."""
    yield None
    for rows, warps, k_groups in itertools.product((2, 4), (8, 16), (1, 2, 4)):
        each = 16 * rows * 576
        yield from (csrc.tile("linear_gemv", rows, warps, k_groups, stages) for stages in range(1, 9) if 36 * 1024 <= stages * each <= 112 * 1024)


def table_tiles(m: int, k: int) -> Iterator[tuple[int, ...] | None]:
    yield None
    yield from (csrc.tile("linear_table", *t) for t in ((2, 2, 8), (2, 1, 8), (4, 2, 8), (4, 2, 4), (7, 1, 2), (8, 2, 4), (14, 2, 2)))
    if m <= 16 and k % 1024 == 0:
        yield from (csrc.tile("linear_table", *t, 4) for t in ((2, 2, 8), (4, 2, 4)))


def wide_tiles(m: int) -> Iterator[tuple[int, ...] | None]:
    yield None
    tokens = next((t for t in (32, 64) if m <= t), 128)
    tiles = ((64, tokens, 4 if tokens == 32 else 2), (128, tokens, 2 if tokens <= 64 else 1))
    yield from (csrc.tile("linear_wide", *tile, splits) for tile in tiles for splits in (1, 2, 4))
    yield csrc.tile("linear_wide", 256 if tokens == 32 else 192 if tokens == 64 else 128, tokens, 1, 0)


def sparse_tiles(m: int) -> Iterator[tuple[int, ...] | None]:
    yield None
    tiles = ((2, 16, 2), (4, 8, 3), (2, 8, 2)) if m <= 8 else ((2, 8, 3), (4, 8, 2), (2, 8, 2)) if m <= 16 else ((2, 8, 2),)
    yield from (csrc.tile(sparse_small.LIBRARY.name, *tile, splits) for tile in tiles for splits in (1, 2, 4))


def sparse_table_tiles(n: int, k: int) -> Iterator[tuple[int, ...] | None]:
    """All that have 4 warps or more, and whose busiest of 132 blocks has at most 1.3 times as many rows as need be."""
    yield None
    busiest = {sets: -(-n // (16 * sets) // 132) * sets for sets in range(2, 17) if 16 * sets <= n}
    for substeps, a_warp, k_groups in itertools.product((2, 4), (1, 2, 4), (2, 4, 6, 7, 8, 16)):
        if k % (128 * substeps) == 0 and k_groups % (substeps // 2) == 0:
            for sets, rows in busiest.items():
                warps = sets // a_warp * k_groups
                if sets % a_warp == 0 and 4 <= warps <= (8 if a_warp == 4 else 16) and rows <= 1.3 * min(busiest.values()):
                    yield csrc.tile(sparse_table.LIBRARY.name, sets, a_warp, k_groups, substeps)


def product(op: str, kernel: str, x: torch.Tensor, weight: tuple, tile=None) -> torch.Tensor:
    """``x @ W.T`` by one kernel, whoever serves the call otherwise."""
    return run.by_form(registry.named(op)[kernel].form, x, weight, tile=tile)


def measure(name: str, tile, call: Callable[[int], torch.Tensor], expected: torch.Tensor, copies: int, facts: dict) -> dict:
    """One line. ``call(i)`` uses copy i of the weight; ``expected`` belongs to copy 0."""
    time_us = graph_us if expected.is_cuda else eager_us
    try:
        off, bound = error(call(0), expected), (FP8_BOUND if name.startswith(TODAY) else 1) * BOUND
        us = time_us(call, copies, 9) if off <= bound else float("nan")
    except Exception as failure:  # a candidate that cannot run is a result, too
        print(f"  {name:10} {tile or ''} FAILED {str(failure)[:140]}", flush=True)
        return dict(facts, kernel=name, tile=str(tile or ""), us="failed", error="")
    print(f"  {name:10} {us:8.2f} us  error {off:.1e} {'' if off <= bound else 'WRONG '}{tile or ''}", flush=True)
    return dict(facts, kernel=name, tile=str(tile or ""), us=round(us, 2), error=f"{off:.1e}")


def epilogues(k: int, n: int, m: int, kinds: tuple[str, ...], x, w, count: int, facts: dict) -> Iterator[dict]:
    """Siblings in one call, act(gate) * up and a residual in the kernel, each beside what takes its place today."""
    q, s, g = w
    third = [n // 2, n // 4 * 3]
    rows = [0, third[0], *third, third[1], n]
    scales = torch.stack((g, g * 2, g / 2))
    arch = host.arch(x.device)
    y = reference(x, q[0], s[0], g)  # of the first 64 rows of x
    if "siblings" in kinds and 2 <= m <= 32:
        want = y * torch.cat((torch.ones(n // 2), torch.full((third[1] - third[0],), 2.0), torch.full((n - third[1],), 0.5))).to(y)
        apart = lambda i: torch.cat(linear_siblings.one_by_one(x, q[i], s[i], scales, None, rows), -1)  # noqa: E731
        yield measure("siblings apart", None, apart, want, count, facts)
        merged = lambda i: csrc.call("linear_small", x, (q[i], s[i]), scales, None, arch, Options(then=Epilogue(tuple(third))))  # noqa: E731
        yield measure("siblings", None, merged, want, count, facts)
    if "epilogue" in kinds and m <= 256:
        sizes = [size for size, low, high in (("gemv", 1, 1), ("small", 1, 32), ("table", 1, 16 if k % 256 == 0 else 0), ("wide", 33, 256)) if low <= m <= high]
        residual = torch.randn(m, n, device=x.device, dtype=x.dtype)
        plus, glu = y + residual[: len(y)].double(), torch.nn.functional.silu(y[:, : n // 2]) * y[:, n // 2 :]
        apart = lambda i: linear_glu.in_two_steps(x, q[i], s[i], g)  # noqa: E731
        yield measure("glu apart", None, apart, glu, count, facts)
        for size in sizes:
            call = lambda i, name=f"linear_{size}_glu": csrc.call(name, x, (q[i], s[i]), g, None, arch, Options(then=Epilogue(act="silu")))  # noqa: E731
            yield measure(f"{size} glu", None, call, glu, count, facts)
        yield measure("residual apart", None, lambda i: torch.ops.fp4.linear(x, q[i], s[i], g) + residual, plus, count, facts)
        for size in sizes:
            then = Epilogue(residual=residual)
            call = lambda i, name=f"linear_{size}_pointwise", then=then: csrc.call(name, x, (q[i], s[i]), g, None, arch, Options(then=then))  # noqa: E731
            yield measure(f"{size} residual", None, call, plus, count, facts)


def shape(k: int, n: int, rows: tuple[int, ...], kinds: tuple[str, ...], device: str = "cuda") -> Iterator[dict]:
    on_gpu = device == "cuda"
    count = copies_for(n * k * 9 // 16) if on_gpu else 2
    q, s, g = weights(n, k, count, device)
    w16 = torch.randn(copies_for(n * k * 2) if on_gpu else 2, n, k, device=device, dtype=torch.bfloat16)
    odd_k = k + 16
    odd = weights(n, odd_k, count, device) if "any_k" in kinds else None
    sp = sparse_weights(n, k, count, device) if "sparse" in kinds else None
    for m in rows:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        expected = reference(x, q[0], s[0], g)
        bf16 = (graph_us if on_gpu else eager_us)(lambda i: torch.nn.functional.linear(x, w16[i]), len(w16), 9)
        facts = dict(machine(), k=k, n=n, m=m, floor_us=round(floor_us(k, n, m), 2), bf16_us=round(bf16, 2))
        print(f"K={k} N={n} M={m}: floor {floor_us(k, n, m):.2f}, bf16 {bf16:.2f} us", flush=True)
        yield measure("current", None, lambda i: torch.ops.fp4.linear(x, q[i], s[i], g), expected, count, facts)
        if "gemv" in kinds and m == 1:
            for tile in gemv_tiles():
                yield measure("gemv", tile, lambda i: product("linear", "cuda_gemv", x, (q[i], s[i], g), tile), expected, count, facts)
                early = Options(tile or (), early=True)
                call = lambda i, early=early: csrc.call("linear_gemv", x, (q[i], s[i]), g, None, host.arch(x.device), early)  # noqa: E731
                yield measure("gemv early", tile, call, expected, count, facts)
        if "small" in kinds and m <= 32:
            for tile in small_tiles(m):
                yield measure("small", tile, lambda i: product("linear", "cuda_small", x, (q[i], s[i], g), tile), expected, count, facts)
        if "table" in kinds and m <= 24 and k % 256 == 0:
            for tile in table_tiles(m, k):
                yield measure("table", tile, lambda i: product("linear", "cuda_table", x, (q[i], s[i], g), tile), expected, count, facts)
        if "early" in kinds and m <= 128 and k % 256 == 0:  # one call behind the other: what is fetched early shows here
            for size in ("table", "wide")[m > 24 :]:
                call = lambda i, name=f"linear_{size}": csrc.call(name, x, (q[i], s[i]), g, None, 90, Options(early=True))  # noqa: E731
                yield measure(f"{size} early", None, call, expected, count, facts)
        yield from epilogues(k, n, m, kinds, x, (q, s, g), count, facts)
        if "any_k" in kinds and m <= 32:
            x_odd = torch.randn(m, odd_k, device=device, dtype=torch.bfloat16)
            oq, os, og = odd
            want = reference(x_odd, oq[0], os[0], og)
            yield measure("current K+16", None, lambda i: torch.ops.fp4.linear(x_odd, oq[i], os[i], og), want, count, facts)
            yield measure("any_k K+16", None, lambda i: product("linear", "cuda_small", x_odd, (oq[i], os[i], og)), want, count, facts)
        if "wide" in kinds and m >= 2:
            for tile in wide_tiles(m):
                yield measure("wide", tile, lambda i: product("linear", "cuda_wide", x, (q[i], s[i], g), tile), expected, count, facts)
        if "w4a4" in kinds and m >= 16 and (not on_gpu or host.arch(x.device) >= 100):
            yield from w4a4_lines(x, q, s, g, count, facts)
        if "sparse" in kinds and m <= 32:
            v, e, ss, sg = sp
            want = sparse_reference(x, v[0], e[0], ss[0], sg)
            if m == 1:
                yield measure("sparse gemv", None, lambda i: product("sparse_linear", "triton_sparse_gemv", x, (v[i], e[i], ss[i], sg)), want, count, facts)
            else:
                yield measure("sparse triton", None, lambda i: product("sparse_linear", "triton_sparse_mid", x, (v[i], e[i], ss[i], sg)), want, count, facts)
            for tile in sparse_tiles(m):
                yield measure("sparse", tile, lambda i: product("sparse_linear", "cuda_sparse_small", x, (v[i], e[i], ss[i], sg), tile), want, count, facts)
            if m <= 16 and k % 256 == 0:
                for tile in sparse_table_tiles(n, k):
                    for begins in ("", " early")[: 1 + ("early" in kinds)]:
                        options = Options(tile or (), early=bool(begins))
                        call = lambda i, options=options: csrc.call(sparse_table.LIBRARY.name, x, (v[i], e[i], ss[i]), sg, None, 90, options)  # noqa: E731
                        yield measure(f"sparse table{begins}", tile, call, want, count, facts)


def w4a4_lines(x, q, s, g, count: int, facts: dict) -> Iterator[dict]:
    """Both operands in NVFP4: the product from codes, by kernel and tile; the whole call, rounding included; the rounding (row maxima by torch) alone."""
    m, n = x.shape[0], q.shape[1]
    rows = quantize_rows_nvfp4.row_scales(x)
    codes = (*torch.ops.fp4.quantize_rows_nvfp4(x, rows), rows)
    want = reference(quantize_rows_nvfp4.dequantize(*codes), q[0], s[0], g)
    arch = host.arch(x.device)
    problem = Problem(m, n, x.shape[1], arch, x.dtype)
    for tile in block_scaled.others(problem):
        yield measure("w4a4", tile, lambda i, tile=tile: run.by_triton(block_scaled.FORM, (*codes, q[i], s[i], g), problem, tile), want, count, facts)
    if arch in (0, 120, 121):
        yield measure("cuda_w4a4", None, lambda i: cuda_w4a4.by_form(mma_sync.LIBRARY, codes, (q[i], s[i], g), problem, None), want, count, facts)
    with dispatch(thresholds={"mid": 8, "small": 0, "cpu": 8}):
        yield measure("w4a4 whole", None, lambda i: torch.ops.fp4.linear(x, q[i], s[i], g, None, "nvfp4"), want, count, facts)
    rounding = lambda i: torch.ops.fp4.quantize_rows_nvfp4(x, quantize_rows_nvfp4.row_scales(x))[0]  # noqa: E731
    yield measure("rounding", None, rounding, codes[0][:64].double(), count, facts)


def host_times() -> None:
    """Microseconds of host time a call takes, the GPU far behind."""
    q, s, g = weights(64, 128, 1)
    x = torch.randn(8, 128, device="cuda", dtype=torch.bfloat16)
    arch = host.arch(x.device)
    print("doors:", {name: csrc.door(name, arch) for name in csrc.LIBRARIES})
    op = torch.ops.fp4_csrc.linear_small.default
    for name, call in {
        "torch.ops.fp4.linear": lambda: torch.ops.fp4.linear(x, q[0], s[0], g),
        "torch.ops.fp4_csrc.linear_small": lambda: op(x, q[0], s[0], g, None, arch),
        "the same through ctypes": lambda: csrc._through_ctypes("linear_small", (x,), (q[0], s[0]), g, None, arch, (0, 0, 0)),
    }.items():
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            call()
        print(f"  {name}: {(time.perf_counter() - start) / 300 * 1e6:.1f} us of host time a call", flush=True)
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="4096x4096 and 8192x8192 only")
    parser.add_argument("--out", type=Path, default=RESULTS / "candidates.csv")
    args = parser.parse_args()
    start = time.perf_counter()
    arch = host.arch(torch.device("cuda", torch.cuda.current_device()))
    with ThreadPoolExecutor() as pool:
        for name, reason in zip(csrc.LIBRARIES, pool.map(lambda name: csrc.why_not(name, arch), csrc.LIBRARIES), strict=True):
            print(f"{name}: {reason or 'built'}", flush=True)
    print(f"built in {time.perf_counter() - start:.0f} s")
    host_times()
    shapes = [SHAPES[0], SHAPES[3]] if args.quick else SHAPES
    rows = [row for k, n in shapes for row in shape(k, n, tuple(args.m), tuple(args.only))]
    write_csv(args.out, rows)


if __name__ == "__main__":
    main()
