"""One decode step of attention over a paged cache: ``fp4.paged_attention`` in one launch, and vLLM's FlashAttention 3 beside it where vLLM is installed.

    python benchmarks/paged_attention.py                            # heads of Qwen3-8B and Qwen3-30B-A3B; results/h100/paged_attention.csv
    python benchmarks/paged_attention.py --heads 32/8 --batch 8     # some of it
    python benchmarks/paged_attention.py --kv fp8                   # a cache in E4M3; FlashAttention then takes queries in it, too, and a launch to round them
    python benchmarks/paged_attention.py --sweep                    # warps of a block and blocks of a cluster
    python benchmarks/paged_attention.py --smoke                    # seconds, on a CPU: does everything run?

A call appends one token of each sequence and attends to all of its tokens; FlashAttention takes three launches for it: vLLM's append, attention, combination of
parts (its schedule is made before, as vLLM does). Cold L2 (caches rotate), CUDA-graph replay, medians. The pages of a sequence lie in a random order.
``floor``: the tokens at the rate of a copy on an H200 (4.58 TB/s; on an H100 3.0), without a launch.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from cached_attention import rate_tb_s
from timing import copies_for, eager_us, graph_us, machine, save

import fp4_inductor  # noqa: F401
from fp4_inductor.kernels import host
from fp4_inductor.kernels.paged_attention import cuda
from fp4_inductor.ops.paged_attention import CODES, PagedCall

D, PAGE = 128, 16
HEADS, LENGTHS, BATCHES = ("32/8", "32/4"), (520, 4096, 8000, 32768), (1, 8, 32, 64)
MEMORY = 12 << 30  # of one case
BLOCKS = range(1, 17)


def calls_of(heads: int, kv_heads: int, batch: int, length: int, device: str, fp8: bool) -> list[PagedCall]:
    """Caches that exceed the L2 together; query, key and value as parts of one product, as in vLLM."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    each, pages = bytes_of(batch, length, kv_heads, fp8), -(-length // PAGE)
    table = (torch.randperm(batch * pages, device=device) + 1).to(torch.int32).view(batch, pages)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    slots = table[:, -1].long() * PAGE + (length - 1) % PAGE
    calls = []
    for _ in range(copies_for(each) if device == "cuda" else 2):
        q, k, v = (
            part.unflatten(1, (-1, D)) for part in torch.randn(batch, (heads + 2 * kv_heads) * D, device=device).to(dtype).split([n * D for n in (heads, kv_heads, kv_heads)], 1)
        )  # fmt: skip
        keys, values = torch.empty(2, batch * pages + 1, PAGE, kv_heads, D, device=device, dtype=dtype).normal_()
        scales = (torch.full((1,), 0.5, device=device),) * 2 if fp8 else (None, None)
        if fp8:
            keys, values = keys.to(CODES), values.to(CODES)
        out = torch.empty(batch, heads, D, dtype=dtype, device=device)
        calls.append(PagedCall(q, k, v, keys, values, table, lengths, slots, out, early=True, key_scale=scales[0], value_scale=scales[1]))
    return calls


def bytes_of(batch: int, length: int, kv_heads: int, fp8: bool) -> int:
    return batch * length * kv_heads * D * 2 * (1 if fp8 else 2)


def kernel_of(c: PagedCall) -> str:
    """Which one serves the call."""
    heads, d = c.query.shape[1:]
    form = cuda.paged_form(c)
    return host.row_for("paged_attention", c.query, heads // c.keys.shape[2], heads, d, form=form).kernel if c.query.is_cuda else "reference"


def flash_attention(calls: list[PagedCall]) -> Callable[[int], object] | None:
    """The same by vLLM's kernels; None: vLLM is not installed."""
    try:
        from vllm import _custom_ops
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError:
        return None
    c, parts = calls[0], 32
    (batch, heads, _), kv_heads, longest = c.query.shape, c.keys.shape[2], int(c.lengths.max())
    starts, one = torch.arange(batch + 1, dtype=torch.int32, device="cuda"), torch.ones((), device="cuda")
    fp8 = cuda.is_in_codes(c)
    scales = {f"{name}_descale": torch.ones(batch, kv_heads, device="cuda") for name in "qkv"} if fp8 else {}
    made = get_scheduler_metadata(
        batch_size=batch, max_seqlen_q=1, max_seqlen_k=longest, num_heads_q=heads, num_heads_kv=kv_heads, headdim=D, cache_seqlens=c.lengths,
        qkv_dtype=CODES if fp8 else torch.bfloat16, cu_seqlens_q=starts, page_size=PAGE, causal=True, window_size=(-1, -1), num_splits=parts,
    )  # fmt: skip

    def call(i: int) -> object:
        c = calls[i]
        keys, values = (x.view(torch.uint8) if fp8 else x for x in (c.keys, c.values))
        query = _custom_ops.scaled_fp8_quant(c.query.flatten(1).contiguous(), one)[0].view(c.query.shape) if fp8 else c.query
        _custom_ops.reshape_and_cache_flash(c.key, c.value, keys, values, c.slots, "fp8" if fp8 else "auto", one, one)
        return flash_attn_varlen_func(
            q=query, k=c.keys, v=c.values, out=c.out, cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=c.lengths, max_seqlen_k=longest, softmax_scale=D**-0.5,
            causal=True, window_size=[-1, -1], block_table=c.table, scheduler_metadata=made, fa_version=3, num_splits=parts, **scales,
        )  # fmt: skip

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=list(HEADS), help="of the query / of keys and values")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--length", type=int, nargs="+", default=list(LENGTHS), help="tokens of each sequence, with the new one")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto", help="the cache: in the dtype of the query, or in E4M3")
    parser.add_argument("--sweep", action="store_true", help="every number of blocks of a KV head")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, time_us = ("cpu", eager_us) if args.smoke else ("cuda", graph_us)
    if args.smoke:
        torch.set_num_threads(1)
        args.batch, args.length = [2], [40]
    rows = []
    for named, batch, length in itertools.product(args.heads, args.batch, args.length):
        heads, kv_heads = map(int, named.split("/"))
        fp8 = args.kv == "fp8"
        size = bytes_of(batch, length, kv_heads, fp8)
        floor = size / rate_tb_s() / 1e6
        if size > MEMORY / 4:
            print(f"{named} batch {batch} of {length}: more than {MEMORY >> 30} GiB, left out", flush=True)
            continue
        calls = calls_of(heads, kv_heads, batch, length, device, fp8)
        ways: dict[str, Callable[[int], object] | None] = {kernel_of(calls[0]): lambda i, calls=calls: torch.ops.fp4.paged_attention(*calls[i])}
        if args.sweep:
            ways |= {
                f"{kernel_of(calls[0])} {n} {warps}": lambda i, calls=calls, n=n, warps=warps: cuda.launch(calls[i], (n, warps))
                for n, warps in itertools.product(BLOCKS, (3, 4))
                if n * batch * kv_heads <= 600
            }
        elif device == "cuda":
            ways["vllm FlashAttention 3" + ", fp8" * fp8] = flash_attention(calls)
        for name, way in ways.items():
            if way is not None:
                us = time_us(way, len(calls))
                sizes = dict(heads=heads, kv_heads=kv_heads, d=D, batch=batch, length=length)
                rows.append(dict(machine(), **sizes, kernel=name, us=round(us, 2), floor_us=round(floor, 2), ratio=round(us / floor, 2)))
                print(f"{named} batch {batch:2} of {length:5} {name:28} {us:8.2f} us, floor {floor:7.2f}", flush=True)
        del calls, ways
    if args.out or not args.sweep:
        save(rows, "paged_attention.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
