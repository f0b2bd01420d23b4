"""Attention of a prompt over a mask, as a StaticCache or padding gives it: fp4.decode_attention against what Transformers' "sdpa" does, on this GPU.

    python benchmarks/masked_attention.py            # python benchmarks/masked_attention.py --smoke  on a CPU

``sdpa`` is F.scaled_dot_product_attention behind repeat_kv, as Transformers calls it with a mask. Masks:

    causal    a prompt in a StaticCache with room for 16 tokens more
    behind    a chunk of a prompt, the last tokens of the cache
    window    causal, 1,024 tokens wide
    padded    causal, sequence i has 200 i tokens of padding on the left

``error``: of the last 64 queries, against float64. Medians of a CUDA graph of calls one behind the other; what fits stays in L2, for either.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention import as_transformers
from timing import eager_us, graph_us, machine, save

import fp4_inductor  # noqa: F401
from fp4_inductor.ops import decode_attention as contract

HEADS, KV_HEADS, WINDOW, PADDING = 32, 8, 1024, 200
# mask, batch, queries, length, width of a head
CASES = (
    *(("causal", 1, q, q + 16, 128) for q in (64, 128, 256, 512, 1024, 2048, 4096, 8192)), ("behind", 1, 128, 8192, 128), ("behind", 1, 512, 8192, 128),
    ("causal", 4, 1024, 1040, 128), ("causal", 1, 2048, 2064, 64), ("causal", 1, 2048, 2064, 256), ("window", 1, 4096, 4112, 128), ("padded", 4, 1000, 1016, 128),
)  # fmt: skip
TINY = (("causal", 1, 40, 56, 64), ("padded", 2, 30, 40, 64))


def mask_of(kind: str, batch: int, queries: int, length: int, device: str) -> torch.Tensor:
    """Bool ``[batch or 1, 1, queries, length]``."""
    at, row = torch.arange(length, device=device), torch.arange(queries, device=device)[:, None]
    seen = at <= row + (length - queries if kind == "behind" else 0)
    if kind == "window":
        seen = seen & (at > row - WINDOW)
    if kind == "padded":
        return seen & (at >= PADDING * torch.arange(batch, device=device)[:, None, None, None])
    return seen[None, None]


def error(got, query, key, value, mask) -> float:
    last = slice(-64, None)
    want = contract.reference(query[:, :, last].float(), key.float(), value.float(), mask[:, :, last]).double()
    return float((got[:, last].double() - want).norm() / want.norm())


def measure(device: str, tiny: bool) -> list[dict]:
    time_us = graph_us if device == "cuda" else eager_us
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for kind, batch, queries, length, d in TINY if tiny else CASES:
        shapes = ((HEADS, queries), (KV_HEADS, length), (KV_HEADS, length))
        query, key, value = (torch.randn(batch, heads, tokens, d, device=device).to(dtype) for heads, tokens in shapes)
        mask = mask_of(kind, batch, queries, length, device)
        times = {}
        for who, call in (("sdpa", as_transformers), ("fp4_inductor", torch.ops.fp4.decode_attention)):
            wrong = error(call(query, key, value, mask), query, key, value, mask)
            run = functools.partial(call, query, key, value, mask)
            times[who] = time_us(lambda _, run=run: run(), 2 if tiny else 5)
            sizes = dict(mask=kind, batch=batch, heads=HEADS, kv_heads=KV_HEADS, d=d, queries=queries, length=length)
            ratio = f"{times[who] / times['sdpa']:.3f}"
            rows.append(dict(machine(), **sizes, who=who, us=round(times[who], 1), ratio=ratio, error=f"{wrong:.1e}"))
            print(*sizes.values(), who, rows[-1]["us"], ratio, rows[-1]["error"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    save(measure("cpu" if args.smoke else "cuda", args.smoke), "masked_attention.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
