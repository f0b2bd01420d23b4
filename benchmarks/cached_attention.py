"""What attention adds to a layer of a decode step over a KVCache, by format, position and batch: ``fp4.cached_attention`` in one launch, on this GPU.

    python benchmarks/cached_attention.py                                  # Qwen3-8B's heads; results/cached_attention.csv
    python benchmarks/cached_attention.py --kv bf16 k8v4 --batch 1 8       # some of it
    python benchmarks/cached_attention.py --sweep --kernels cuda_step_attention_codes --kv k8v4 --at 8192
    python benchmarks/cached_attention.py --apart                          # torch's operators around a dequantized cache beside it
    python benchmarks/cached_attention.py --smoke                          # seconds, on a CPU: does everything run?

A call is RMSNorm and rotation of query and key, append of one token and attention to all of them. Cold L2 (caches rotate), CUDA-graph replay, medians.
``floor``: the codes, scales and exact tokens of all positions at the rate of a copy on an H200 (4.58 TB/s; on an H100 3.0), without a launch.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import copies_for, eager_us, graph_us, machine, save

import fp4_inductor
from fp4_inductor.formats import kv as formats
from fp4_inductor.kernels import host, select
from fp4_inductor.kernels.cached_attention import cuda, cuda_step, quantized, step
from fp4_inductor.ops.cached_call import CachedCall, Prologue, Stored

HEADS, KV_HEADS, D = 32, 8, 128
AT, BATCHES = (520, 4096, 8192, 32768), (1, 8, 32)
MEMORY = 24 << 30  # of all caches of a case


def by_clusters(c: CachedCall, blocks: int = 0) -> torch.Tensor:
    return cuda_step.step(c, (blocks, 0))


# Functions of kernels that do a whole step, and the formats that they take.
KERNELS: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...]]] = {
    cuda_step.NAME: (by_clusters, (formats.DENSE,)),
    cuda_step.NAME_OF_CODES: (by_clusters, cuda_step.FORMATS),
    "triton_cached_attention": (step.step, (formats.DENSE,)),
    "cuda_quantized_attention": (cuda.quantized, tuple(formats.FORMATS)),
    "triton_quantized_attention": (quantized.quantized, tuple(formats.FORMATS)),
}

# What is searched of kernels whose tile is a number: blocks of a KV head; the most parts of a sequence.
NUMBERS = {
    **dict.fromkeys((cuda_step.NAME, cuda_step.NAME_OF_CODES), range(1, 17)),
    "cuda_quantized_attention": (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64),
}


def rate_tb_s() -> float:
    """What a copy reaches: 4.58 TB/s on an H200, 3.0 on an H100."""
    return 4.58 if torch.cuda.is_available() and "H200" in torch.cuda.get_device_name() else 3.0


def token_bytes(name: str) -> float:
    """Of K and V of one token and head."""
    f = formats.named(name)
    return 4.0 * D if f is None else f.bits(D) * D / 8


def floor_us(name: str, batch: int, at: int) -> float:
    f = formats.named(name)
    exact = 4.0 * D * (formats.FIRST + formats.LAST) if f is not None and f.exact else 0.0
    return batch * KV_HEADS * (token_bytes(name) * at + exact) / rate_tb_s() / 1e6


class Case:
    """Caches of one format, enough to exceed the L2; one new token and one counter for all."""

    def __init__(self, name: str, batch: int, at: int, device: str):
        on_gpu = device == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        slots = at + 8
        self.copies = min(copies_for(int(batch * KV_HEADS * slots * token_bytes(name))), 64) if on_gpu else 2
        new = [torch.randn(batch, n, 1, D, device=device).to(dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]
        norms = [torch.randn(D, device=device).to(dtype) for _ in range(2)]
        angles = torch.rand(1, 1, D, device=device) * 6
        prologue = Prologue(*norms, 1e-6, 0.0, angles.cos().to(dtype), angles.sin().to(dtype), D)
        position = torch.tensor(at, device=device)
        arrivals = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device=device)
        self.calls = []
        for _ in range(self.copies):
            keys, values, stored = self.cache(name, batch, slots, dtype, device)
            self.calls.append(CachedCall(*new, keys, values, position, arrivals=arrivals, prologue=prologue, stored=stored))

    @staticmethod
    def cache(name: str, batch: int, slots: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, Stored | None]:
        f, lead = formats.named(name), (batch, KV_HEADS, slots)
        if f is None:
            keys, values = torch.empty(2, *lead, D, device=device, dtype=dtype).normal_()
            return keys, values, None
        rows = [formats.empty(kind, lead, D, torch.device(device)) for kind in (f.key, f.value)]
        for row in rows:
            row.codes.view(torch.uint8).random_(0, 0x77)  # any number but NaN
            row.scale.fill_(0.01)
            if row.blocks is not None:
                row.blocks.view(torch.uint8).random_(0x30, 0x60)
        exact = [torch.randn(batch, KV_HEADS, formats.exact_slots(slots, 128), D, device=device).to(dtype) if f.exact else None for _ in range(2)]
        mean = torch.randn(batch, KV_HEADS, D, device=device)
        return rows[0].codes, rows[1].codes, Stored(rows[0].scale, rows[1].scale, mean, rows[1].blocks, rows[0].blocks, *exact)

    @property
    def kernel(self) -> str:
        """Which one serves the call."""
        c = self.calls[0]
        return host.row_for("cached_attention", c.query, HEADS // KV_HEADS, HEADS, D, form=select.cached_form(c)).kernel

    def call(self, i: int) -> torch.Tensor:
        return torch.ops.fp4.cached_attention(*self.calls[i].flat())


def cases(args: argparse.Namespace, device: str):
    for batch, at, name in itertools.product(args.batch, args.at, args.kv):
        if batch * KV_HEADS * at * token_bytes(name) * 4 > MEMORY:
            print(f"{name} batch {batch} at {at}: more than {MEMORY >> 30} GiB, left out", flush=True)
            continue
        yield dict(kv=name, batch=batch, heads=HEADS, kv_heads=KV_HEADS, d=D, at=at), Case(name, batch, at, device)


def measure(args: argparse.Namespace, device: str) -> list[dict]:
    """What serves the op, then the other kernels that take the format."""
    time_us = graph_us if device == "cuda" else eager_us
    rows = []
    for sizes, case in cases(args, device):
        floor = floor_us(sizes["kv"], sizes["batch"], sizes["at"])
        calls: dict[str, Callable[[int], torch.Tensor]] = {case.kernel: case.call}
        for name, (run, takes) in KERNELS.items():
            if device == "cuda" and name in args.kernels and sizes["kv"] in takes:
                calls.setdefault(name, lambda i, run=run, case=case: run(case.calls[i]))
        if args.apart:
            calls["apart"] = lambda i, case=case: apart(case, i)
        for name, call in calls.items():
            us = time_us(call, case.copies)
            rows.append(dict(machine(), **sizes, kernel=name, us=round(us, 2), floor_us=round(floor, 2), ratio=round(us / floor, 2)))
            print(f"{sizes['kv']:5} batch {sizes['batch']:2} at {sizes['at']:5} {name:26} {us:8.2f} us, floor {floor:7.2f}, {us / floor:.2f}", flush=True)
        del case, calls
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def apart(case: Case, i: int) -> torch.Tensor:
    with fp4_inductor.dispatch(thresholds={"step_attention": 0, "cuda_attention": 0, "attention": 0}):
        return case.call(i)


def sweep(args: argparse.Namespace) -> list[dict]:
    """Every tile for every case, the best four printed."""
    rows = []
    if args.kernels[0] in NUMBERS:
        run, takes = KERNELS[args.kernels[0]]
        for sizes, case in cases(args, "cuda"):
            if sizes["kv"] not in takes:
                continue
            tiles = [0, *(n for n in NUMBERS[args.kernels[0]] if n * sizes["batch"] * KV_HEADS <= 1600)]
            found = [(graph_us(lambda i, n=n, case=case: run(case.calls[i], n), min(case.copies, 32), 5), n) for n in tiles]
            floor = floor_us(sizes["kv"], sizes["batch"], sizes["at"])
            told = ", ".join(f"{n}: {us:.2f}" for us, n in sorted(found)[:8])
            print(f"{sizes['kv']} batch {sizes['batch']} at {sizes['at']}: floor {floor:.2f}, default {found[0][0]:.2f} us; {told}", flush=True)
            rows += [dict(machine(), **sizes, us=round(us, 2), floor_us=round(floor, 2), config=n) for us, n in found]
        return rows
    for sizes, case in cases(args, "cuda"):
        c = case.calls[0]
        device, length = c.query.device, c.slots
        dense = step.config(sizes["batch"], KV_HEADS, length, D, host.processors(device), host.arch(device))
        default = dense if c.stored is None else quantized.tile_of(c, host.processors(device), host.arch(device))
        launch: Any = step.step if c.stored is None else quantized.quantized
        found = []
        for block, warps, stages in ((32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 2), (64, 8, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3)):
            for splits in sorted({1, 2, 4, 8, 12, 16, 24, 33, default.splits}):
                programs = sizes["batch"] * KV_HEADS * splits
                if splits * block > length or programs > 1100 or (programs < 64 and splits < 16):
                    continue
                tile = step.StepConfig(block, splits, default.least, warps, stages)
                try:
                    us = graph_us(lambda i, tile=tile, case=case, launch=launch: launch(case.calls[i], tile), min(case.copies, 32), 5)
                except Exception as failure:  # a candidate that does not fit is reported, not fatal
                    print(f"{tile}: {str(failure)[:100]}", flush=True)
                    continue
                found.append((us, tile == default, tile))
        found.sort(key=lambda f: f[0])
        floor = floor_us(sizes["kv"], sizes["batch"], sizes["at"])
        us = next((us for us, is_default, _ in found if is_default), float("nan"))
        print(f"{sizes['kv']} batch {sizes['batch']} at {sizes['at']}: floor {floor:.2f}, default {us:.2f} us {default}", flush=True)
        print(*(f"  {us:7.2f} us {tile}" for us, _, tile in found[:4]), sep="\n", flush=True)
        rows += [dict(machine(), **sizes, us=round(us, 2), floor_us=round(floor, 2), config=str(tile)) for us, _, tile in found]
        del case, c
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", nargs="+", choices=formats.NAMES, default=list(formats.NAMES))
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--at", type=int, nargs="+", default=list(AT), help="how many tokens came before")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="besides what serves the op; with --sweep the first")
    parser.add_argument("--apart", action="store_true", help="torch's operators beside it")
    parser.add_argument("--sweep", action="store_true", help="search the tiles")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        torch.set_num_threads(1)
        args.batch, args.at = [2], [40]
    rows = sweep(args) if args.sweep else measure(args, "cpu" if args.smoke else "cuda")
    if args.out or not args.sweep:
        save(rows, "cached_attention.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
