"""A chain of products of one row (``fp4.linear_chain``: o, gate and up, down, q/k/v), on one GPU, and on the GPUs of torchrun, which sum inside the launch.

    python benchmarks/chain.py
    torchrun --nproc-per-node 2 benchmarks/chain.py

A CUDA graph holds the chains of several layers, whose weights together are larger than L2; ``us`` is the median of one chain. ``floor_us``: its bytes at the
bandwidth of the data sheet. ``error``: the largest relative error of a product of the first layer against the op's reference, which has the whole weights.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from timing import machine, save

from fp4_inductor import _exchange
from fp4_inductor.formats import nvfp4
from fp4_inductor.integrations.rank_memory import join
from fp4_inductor.kernels import csrc
from fp4_inductor.kernels.linear_chain import on_csrc
from fp4_inductor.ops.linear_chain import ARRIVALS, ChainCall, Product, Routing, reference
from fp4_inductor.ops.router import FORMS

BF16 = torch.bfloat16
BANDWIDTH = {"H100": 3.35e6, "H200": 4.8e6}  # bytes in a microsecond


class Shape(NamedTuple):
    hidden: int
    attended: int
    inner: int
    qkv: int
    experts: int = 0
    top_k: int = 0


SHAPES = {
    "qwen3-8b": Shape(4096, 4096, 12288, 6144),
    "qwen3-30b-a3b": Shape(2048, 4096, 768, 5120, 128, 8),
    "70b": Shape(8192, 8192, 28672 // 2, 10240),  # K is at most 16,384: half of its inner dimension, as a rank of two has
    "llama-1b": Shape(2048, 2048, 8192, 3072),
}
SMOKE = {"dense": Shape(64, 128, 128, 96), "experts": Shape(64, 64, 64, 96, 4, 2)}


def weight(device: torch.device, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales near one."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(0x34, 0x3C, (*shape[:-1], shape[-1] // nvfp4.GROUP), dtype=torch.uint8, device=device)
    return codes, scale.view(nvfp4.SCALE_DTYPE)


def layer(s: Shape, device: torch.device) -> list[Product]:
    def scale(k: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, 0.3 / k**0.5, device=device)

    def norm() -> dict[str, Any]:
        return dict(norm_weight=1 + 0.1 * torch.randn(s.hidden, device=device).to(BF16), eps=1e-6)

    residual = torch.randn(1, s.hidden, device=device).to(BF16)
    first = Product(*weight(device, s.hidden, s.attended), scale(s.attended), residual=residual)
    last = Product(*weight(device, s.qkv, s.hidden), scale(s.hidden), **norm())
    if s.experts:
        router = Routing(torch.randn(s.experts, s.hidden, device=device).to(BF16), s.top_k, FORMS[1], True)
        gate_up = Product(*weight(device, s.experts, 2 * s.inner, s.hidden), scale(s.hidden, s.experts), act="silu", glu=True, routing=router, **norm())
        down = Product(*weight(device, s.experts, s.hidden, s.inner), scale(s.inner, s.experts), added=0)
        return [first, gate_up, down, last]
    gate_up = Product(*weight(device, 2 * s.inner, s.hidden), scale(s.hidden), act="silu", glu=True, **norm())
    return [first, gate_up, Product(*weight(device, s.hidden, s.inner), scale(s.inner), added=0), last]


def part(products: list[Product], rank: int, ranks: int) -> list[Product]:
    """What one rank has: columns of o and down, whose results are summed, and rows of the others."""

    def columns(t: torch.Tensor) -> torch.Tensor:
        return t.view(torch.uint8).chunk(ranks, -1)[rank].contiguous().view(t.dtype)

    def rows(t: torch.Tensor, halves: int) -> torch.Tensor:
        return torch.cat([half.chunk(ranks, -2)[rank] for half in t.view(torch.uint8).chunk(halves, -2)], -2).contiguous().view(t.dtype)

    def of(i: int, p: Product) -> Product:
        if i in (0, 2):
            return p._replace(qdata=columns(p.qdata), scale=columns(p.scale), summed=True)
        return p._replace(qdata=rows(p.qdata, 1 + p.glu), scale=rows(p.scale, 1 + p.glu))

    return [of(i, p) for i, p in enumerate(products)]


def bytes_of(products: list[Product]) -> int:
    """What a chain reads of its weights: of experts those that are chosen."""
    total, chosen = 0, 1.0
    for p in products:
        if p.routing is not None:
            chosen = p.routing.top_k / p.qdata.shape[0]
        read = chosen if p.qdata.dim() == 3 else 1.0
        total += int(read * (p.qdata.nbytes + p.scale.nbytes)) + (p.routing.router.nbytes if p.routing else 0)
    return total


def call(x: torch.Tensor, products: list[Product], arrivals: torch.Tensor, group: str) -> tuple[torch.Tensor, ...]:
    c = ChainCall.made(x, products, arrivals, group=group)
    if x.device.type != "cuda":
        return torch.ops.fp4.linear_chain(*c)
    return getattr(torch.ops.fp4_csrc, on_csrc.NAME)(*c[: ChainCall._fields.index("group")], _exchange.number_of(group), 1, 90)


def error_of(results: tuple[torch.Tensor, ...], x: torch.Tensor, whole: list[Product], arrivals: torch.Tensor, rank: int, ranks: int) -> float:
    want = list(reference(ChainCall.made(x, whole, arrivals)))
    want[3] = want[3].chunk(ranks, -1)[rank % ranks]
    checked = (0, 2, 3)
    return max(float((results[i].double() - want[i].double()).norm() / want[i].double().norm()) for i in checked)


def us_of(calls: Any, count: int, device: torch.device) -> float:
    calls()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        calls()
    for _ in range(25):
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 5 / count)
    graph.reset()
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, wherever this runs")
    args = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    group = ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        csrc.binding()
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **({"device_id": device} if device.type == "cuda" else {}))
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        if device.type == "cuda" and (reason := join(dist.group.WORLD, device)):
            raise SystemExit(reason)
    rows: list[dict] = []
    facts = machine()
    for name, shape in (SMOKE if args.smoke else SHAPES).items():
        torch.manual_seed(0)
        layers = [layer(shape, device)]
        count = 2 if args.smoke else min(10, max(3, (800 << 20) // bytes_of(layers[0])))
        layers += [layer(shape, device) for _ in range(count - 1)]
        xs = [torch.randn(1, shape.attended, device=device).to(BF16) for _ in range(count)]
        arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        one = 0.0
        for here in dict.fromkeys((1, ranks)):
            held = layers if here == 1 else [part(products, rank, ranks) for products in layers]
            given = xs if here == 1 else [x.chunk(ranks, -1)[rank].contiguous() for x in xs]
            named = group if here > 1 else ""

            def calls(held=held, given=given, named=named, arrivals=arrivals) -> None:
                for x, products in zip(given, held, strict=True):
                    call(x, products, arrivals, named)

            error = error_of(call(given[0], held[0], arrivals, named), xs[0], layers[0], arrivals, rank, here)
            us = us_of(calls, count, device)
            floor = bytes_of(held[0]) / next((rate for gpu, rate in BANDWIDTH.items() if gpu in facts["gpu"]), 1e6)
            one = us if here == 1 else one
            row = dict(shape=name, ranks=here, us=f"{us:.2f}", floor_us=f"{floor:.2f}", floor_ratio=f"{us / floor:.2f}")
            rows.append(facts | row | dict(of_one=f"{one / us:.3f}" if us else "", error=f"{error:.1e}"))
            if rank == 0:
                print(rows[-1], flush=True)
        del layers, held
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        save(rows, "chain_ranks.csv", args.out, args.smoke)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
