"""Attention of one decode step over a static cache: fp4.decode_attention against what Transformers' "sdpa" does, on this GPU.

    python benchmarks/attention.py            # Qwen3-8B's and Qwen3-30B's heads, batch 1, 8, 32, caches of 520 and 4104; results/attention.csv
    python benchmarks/attention.py --codes int8    # a cache in int8 or fp8 and scales, beside a graph that dequantizes it; written only with --out
    python benchmarks/attention.py --sweep    # tiles, parts, warps and stages of our kernel instead
    python benchmarks/attention.py --smoke    # seconds, on a CPU: does everything run?

``sdpa`` is F.scaled_dot_product_attention behind repeat_kv, as Transformers calls it with a mask; ``sdpa_gqa`` with
enable_gqa instead. Cold L2 (caches rotate), CUDA-graph replay, medians. ``floor``: the filled part of K and V at the
streaming rate of an H200, and 2 us of launch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import copies_for, eager_us, graph_us, machine, save

import fp4_inductor
from fp4_inductor.kernels import registry
from fp4_inductor.ops import decode_attention as contract

MODELS = {"qwen3-8b": (32, 8, 128), "qwen3-30b": (32, 4, 128)}  # heads, KV heads, width
BATCHES, LENGTHS, FILLED = (1, 8, 32), (520, 4104), (0.5, 1.0)
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CANDIDATES = tuple(k.name for k in registry.kernels("decode_attention") if any(on.off for on in k.on))
STREAM_TB_S, LAUNCH_US = 4.58, 2.0


def floor_us(batch: int, kv_heads: int, length: int, d: int) -> float:
    """Microseconds to read ``length`` positions of K and V."""
    return 2 * 2 * batch * kv_heads * length * d / STREAM_TB_S / 1e6 + LAUNCH_US


def as_transformers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As Transformers' ``sdpa_attention_forward`` over a mask: query heads that share K and V get copies."""
    k, v = (t[:, :, None].expand(-1, -1, query.shape[1] // t.shape[1], -1, -1).reshape(t.shape[0], -1, *t.shape[2:]) for t in (key, value))
    return F.scaled_dot_product_attention(query, k, v, attn_mask=mask).transpose(1, 2).contiguous()


class Coded:
    """As :class:`Case`, over codes of 8 bits with a scale for each token and head."""

    def __init__(self, batch: int, heads: int, kv_heads: int, d: int, length: int, filled: float, device: str, kind: torch.dtype):
        dense = Case(batch, heads, kv_heads, d, length, filled, device)
        self.copies, self.query, self.mask = dense.copies, dense.query, dense.mask
        self.scales = torch.rand(2, batch, kv_heads, length, 1, device=device).to(self.query.dtype) / 30 + 0.01
        self.caches = [[(40 * t.float()).clamp(-127, 127).to(kind) for t in pair] for pair in dense.caches]
        torch._dynamo.reset()  # else the ninth size would run without being compiled
        self.compiled = torch.compile(self._dequantized, dynamic=False) if device == "cuda" else self._dequantized

    def ours(self, i: int):
        with fp4_inductor.dispatch(candidates=CANDIDATES):
            return torch.ops.fp4.decode_attention(self.query, *self.caches[i], self.mask, None, *self.scales)

    @staticmethod
    def _dequantized(query, key, value, key_scale, value_scale, mask):
        key, value = key.to(query.dtype) * key_scale, value.to(query.dtype) * value_scale
        return as_transformers(query, key, value, mask)

    def sdpa(self, i: int):
        with torch.no_grad(), fp4_inductor.dispatch(thresholds={"attention": 0}):
            return self.compiled(self.query, *self.caches[i], *self.scales, self.mask)

    def error(self, y) -> float:
        want = contract.reference(self.query.float(), *self.caches[0], self.mask, None, *self.scales).double()
        return float((y.double() - want).norm() / want.norm())


class Case:
    """Caches enough to exceed the L2, one query and mask for all."""

    def __init__(self, batch: int, heads: int, kv_heads: int, d: int, length: int, filled: float, device: str):
        on_gpu = device == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        self.copies = min(copies_for(4 * batch * kv_heads * length * d), 64) if on_gpu else 2
        self.query = torch.randn(batch, heads, 1, d, device=device).to(dtype)
        self.caches = torch.empty(self.copies, 2, batch, kv_heads, length, d, device=device, dtype=dtype).normal_()
        self.mask = (torch.arange(length, device=device) < int(length * filled)).expand(batch, 1, 1, length).clone()

    def ours(self, i: int):
        return torch.ops.fp4.decode_attention(self.query, *self.caches[i], self.mask)

    def sdpa(self, i: int):
        return as_transformers(self.query, *self.caches[i], self.mask)

    def sdpa_gqa(self, i: int):
        return F.scaled_dot_product_attention(self.query, *self.caches[i], attn_mask=self.mask, enable_gqa=True).transpose(1, 2).contiguous()

    def error(self, y) -> float:
        want = contract.reference(self.query.float(), *self.caches[0].float(), self.mask).double()
        return float((y.double() - want).norm() / want.norm())


def cases(device: str, tiny: bool, codes: str = ""):
    for model, (heads, kv_heads, d) in MODELS.items():
        for batch in (1,) if tiny else BATCHES:
            for length in (40,) if tiny else LENGTHS:
                for filled in FILLED:
                    yield (
                        dict(model=model, batch=batch, heads=heads, kv_heads=kv_heads, d=d, length=length, filled=int(length * filled)),
                        Coded(batch, heads, kv_heads, d, length, filled, device, CODES[codes])
                        if codes
                        else Case(batch, heads, kv_heads, d, length, filled, device),
                    )


def measure(device: str, tiny: bool, codes: str = "") -> list[dict]:
    time_us = graph_us if device == "cuda" else eager_us
    rows = []
    for sizes, case in cases(device, tiny, codes):
        floor = floor_us(sizes["batch"], sizes["kv_heads"], sizes["filled"], sizes["d"])
        if codes:
            floor = (floor - LAUNCH_US) / 2 + LAUNCH_US
            sizes |= dict(codes=codes)
        for who in ("fp4_inductor", "sdpa") if codes else ("fp4_inductor", "sdpa", "sdpa_gqa"):
            call = case.ours if who == "fp4_inductor" else getattr(case, who)
            e, us = case.error(call(0)), time_us(call, case.copies if who == "fp4_inductor" else min(case.copies, 16))
            rows.append(dict(machine(), **sizes, who=who, us=round(us, 2), floor_us=round(floor, 2), error=f"{e:.1e}"))
            print(
                f"{sizes['model']:10} batch {sizes['batch']:2} cache {sizes['filled']:4} of {sizes['length']:4} {who:13} {us:8.2f} us  "
                f"floor {floor:7.2f}  error {e:.1e}",
                flush=True,
            )
        del case
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def sweep() -> list[dict]:
    """Every tile for every size, the best four printed."""
    from fp4_inductor.kernels import host
    from fp4_inductor.kernels.decode_attention import split

    rows = []
    for sizes, case in cases("cuda", False):
        if (sizes["filled"] == sizes["length"]) != (sizes["length"] == LENGTHS[0]):
            continue  # the short cache full, the long one half full: what a model meets
        batch, kv_heads, d, length = (sizes[name] for name in ("batch", "kv_heads", "d", "length"))
        default = split.attention(batch, kv_heads, length, d, host.processors(case.query.device), host.arch(case.query.device))
        shared = [s for s in sorted({1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, default.splits}) if s == 1 or (batch * kv_heads * s <= 800 and s * 16 <= length)]
        tiles = [(32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3)]
        found = []
        for block, warps, stages in tiles:
            for splits in shared:
                if batch * kv_heads * splits < 64 and splits != shared[-1]:
                    continue
                c = split.AttentionConfig(block, splits, warps, stages)

                def call(i, c=c, case=case, d=d):
                    return split.split(case.query, *case.caches[i], case.mask, d**-0.5, c)

                try:
                    found.append((graph_us(call, min(case.copies, 32), 5), c == default, c))
                except Exception as failure:  # a candidate that does not fit is reported, not fatal
                    print(f"{c}: {str(failure)[:100]}", flush=True)
        found.sort(key=lambda f: f[0])
        us = next((us for us, is_default, _ in found if is_default), float("nan"))
        floor = floor_us(batch, kv_heads, sizes["filled"], d)
        print(f"{sizes['model']} batch {batch} cache {sizes['filled']} of {length}: floor {floor:.2f}, default {us:.2f} us {default}", flush=True)
        print(*(f"  {us:7.2f} us {c}" for us, _, c in found[:4]), sep="\n", flush=True)
        rows += [dict(machine(), **sizes, us=round(us, 2), config=str(c)) for us, _, c in found]
        del case
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="search the tiles of our kernel")
    parser.add_argument("--codes", choices=tuple(CODES), default="", help="a cache in 8 bits with a scale for each token and head")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        torch.set_num_threads(1)
    rows = sweep() if args.sweep else measure("cpu" if args.smoke else "cuda", args.smoke, args.codes)
    if args.out or not (args.sweep or args.codes):
        save(rows, "attention.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
