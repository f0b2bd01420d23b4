"""What attention adds to a layer of a prompt over a KVCache, by format, tokens and what the cache holds before: ``fp4.cached_attention`` on this GPU.

    python benchmarks/cached_prompt.py                                # Qwen3-8B's heads, each result checked first; results/cached_prompt.csv
    python benchmarks/cached_prompt.py --kv bf16 nvfp4 --cases 512,0,1 8192,0,1    # some of it: tokens, tokens before, batch
    python benchmarks/cached_prompt.py --few                          # only 1, 16, 64 and 256 tokens behind 8192 and 32768
    python benchmarks/cached_prompt.py --window 1024                  # a sliding window
    python benchmarks/cached_prompt.py --sweep --kv nvfp4             # tiles of the kernel; of few tokens, parts of the keys, too
    python benchmarks/cached_prompt.py --smoke                        # seconds, on a CPU: does everything run?

``who``: ``triton_prefill_attention``, or ``append + attention``: torch's operators, of an empty cache around ``fp4.append_kv``; ``sdpa``: torch's causal
attention over tokens in bfloat16, without any cache; ``one launch``: the kernel of a decode step, up to 16 queries of a KV head. Times are of single calls
with a cold L2, medians; ``attention_us`` has both launches where keys are divided into ``parts``. ``eager_us`` is the wall time of a call that is not waited
for, which is what a short prompt takes. ``floor_us``: keys and values in bfloat16 at the rate of a copy, or the products at that of dense bfloat16, the larger one.
``error`` is against float32, of some queries of the first sequence.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import machine, save

from fp4_inductor.formats import kv as formats
from fp4_inductor.kernels import host
from fp4_inductor.kernels.cached_attention import append, composed, prefill
from fp4_inductor.kernels.cached_attention.prefill import PrefillConfig
from fp4_inductor.ops import append_kv, cached_attention
from fp4_inductor.ops.cached_call import CachedCall, Stored

HEADS, KV_HEADS, D = 32, 8, 128
CASES = ((512, 0, 1), (2048, 0, 1), (8192, 0, 1), (8192, 0, 8), (64, 8192, 1), (512, 8192, 1), (2048, 8192, 1))
FEW = tuple(itertools.product((1, 16, 64, 256), (8192, 32768), (1,)))
TRITON, APART, SDPA, ONE = "triton_prefill_attention", "append + attention", "sdpa", "one launch"
ONE_LAUNCH_ROWS = 16  # queries of a KV head
FLUSHED = 256 << 20  # bytes that are written before each call
RATE_TB_S, RATE_TFLOPS = 3.0, 700.0  # of an H100: a copy, and dense bfloat16 products of a library
SPENT = 0.12  # seconds for a figure, at most, but for a single call
SAMPLED = 48  # queries whose result is checked


def timed_us(call: Callable[[], object]) -> float:
    """Median of single calls between events."""
    times: list[float] = []
    call()
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    deadline = time.perf_counter() + SPENT
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)  # the host is ahead of the device, so that launches follow each other
        flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
        if times[-1] > SPENT * 1e6:
            break
    return sorted(times)[len(times) // 2]


def eager_us(call: Callable[[], object]) -> float:
    """Wall time of one of several calls in a row."""
    call()
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    sync()
    begin, count = time.perf_counter(), 0
    while count < 2 or (time.perf_counter() - begin < SPENT and count < 20):
        call()
        count += 1
        if count >= 2 and time.perf_counter() - begin > SPENT:
            break
    sync()
    return (time.perf_counter() - begin) * 1e6 / count


class Case:
    """A layer's cache of one format with ``filled`` tokens, and ``tokens`` more."""

    def __init__(self, name: str, tokens: int, filled: int, batch: int, window: int | None, device: str):
        torch.manual_seed(0)
        self.format, self.tokens, self.filled, self.window = formats.named(name), tokens, filled, window
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        length = filled + tokens
        slots = length if window is None else window + 128
        self.key, self.value = (torch.randn(batch, KV_HEADS, length, D, device=device).to(dtype) for _ in range(2))
        self.key += 2.0 * (torch.arange(D, device=device) % 16 == 3)  # a part that the mean takes away
        query = torch.randn(batch, HEADS, tokens, D, device=device).to(dtype)
        stored = None
        if self.format is None:
            keys, values = torch.zeros(2, batch, KV_HEADS, slots, D, device=device, dtype=dtype)
        else:
            lead = (batch, KV_HEADS, slots)
            rows = [formats.empty(kind, lead, D, torch.device(device)) for kind in (self.format.key, self.format.value)]
            exact = [torch.zeros(batch, KV_HEADS, formats.exact_slots(slots, 128), D, device=device, dtype=dtype) if self.format.exact else None for _ in "kv"]
            mean = torch.zeros(batch, KV_HEADS, D, device=device)
            keys, values = rows[0].codes, rows[1].codes
            stored = Stored(rows[0].scale, rows[1].scale, mean, rows[1].blocks, rows[0].blocks, *exact)
        position = torch.zeros((), dtype=torch.int64, device=device)
        arrivals = torch.zeros(batch * KV_HEADS, dtype=torch.int32, device=device)
        call = CachedCall(query, self.key, self.value, keys, values, position, window=window, empty=filled == 0, arrivals=arrivals, stored=stored)
        if filled:
            self._fill(call._replace(query=self.key[:, :, :filled], key=self.key[:, :, :filled], value=self.value[:, :, :filled]))
        position.fill_(filled)
        self.call = call._replace(key=self.key[:, :, filled:], value=self.value[:, :, filled:])

    @staticmethod
    def _fill(c: CachedCall) -> None:
        if c.stored is not None:
            torch.ops.fp4.append_kv(*append_kv.AppendCall.flat_of(c))
            return
        kept = torch.arange(c.key.shape[2], device=c.key.device)[-c.slots :]
        for held, new in ((c.keys, c.key), (c.values, c.value)):
            held[:, :, kept % c.slots] = new[:, :, kept]

    @functools.cached_property
    def repeated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For a bias of torch's, which takes no groups of heads; not timed."""
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (self.key, self.value))
        return key, value

    def run(self, who: str) -> torch.Tensor:
        if who == SDPA:
            key, value = self.key, self.value
            if not self.filled:
                out = F.scaled_dot_product_attention(self.call.query, key, value, is_causal=True, enable_gqa=True)
            else:
                from torch.nn.attention.bias import causal_lower_right

                key, value = self.repeated
                out = F.scaled_dot_product_attention(self.call.query, key, value, attn_mask=causal_lower_right(self.tokens, key.shape[2]))
            return out.transpose(1, 2)
        if who == ONE:
            return torch.ops.fp4.cached_attention(*self.call.flat())
        return prefill.prefill(self.call) if who == TRITON else composed.apart(self.call)

    def error(self, out: torch.Tensor) -> float:
        """Relative, against float32 over keys and values that ``formats.kv`` rounds with the cache's mean."""
        where = torch.linspace(0, self.tokens - 1, min(SAMPLED, self.tokens), device=out.device).long()
        key, value = (t[:1].float() for t in (self.key, self.value))
        at, query = torch.arange(key.shape[2], device=out.device), (self.filled + where)[:, None]
        seen = at <= query
        if self.window is not None:
            seen = seen & (at > query - self.window)
        q = self.call.query[:1, :, where].float().unflatten(1, (KV_HEADS, -1))

        def scores(key: torch.Tensor) -> torch.Tensor:
            return q @ key[:, :, None].mT * D**-0.5

        if self.format is None or self.call.stored is None:
            weights = scores(key).masked_fill(~seen, float("-inf")).softmax(-1)
            want = weights @ value[:, :, None]
        else:
            mean = self.call.stored.key_mean[:1]
            rounded_key = formats.dequantize(formats.quantize(self.key[:1], self.format.key, mean), self.format.key, mean)
            rounded_value = formats.dequantize(formats.quantize(self.value[:1], self.format.value), self.format.value)
            exact = formats.is_exact(query, at) if self.format.exact else torch.zeros_like(seen)
            s = torch.where(exact, scores(key), scores(rounded_key)).masked_fill(~seen, float("-inf"))
            weights = s.softmax(-1)
            want = (weights * exact) @ value[:, :, None] + (weights * ~exact) @ rounded_value[:, :, None]
        want = want.flatten(1, 2).transpose(1, 2)
        got = out[:1, where].float()
        return ((got - want).norm() / want.norm()).item()

    @property
    def tile(self) -> PrefillConfig:
        """Of the kernel, as it is chosen on this GPU."""
        c, exact = self.call, self.format is not None and self.format.exact
        keys = self.tokens if self.filled == 0 else c.slots if self.window is None else self.window - 1 + self.tokens
        return prefill.config_of(c, keys, exact, host.arch(c.query.device), host.processors(c.query.device))

    def floor_us(self) -> float:
        keys = self.filled + self.tokens if self.window is None else min(self.filled + self.tokens, self.window - 1 + self.tokens)
        return max(4 * D * KV_HEADS * self.key.shape[0] * keys / RATE_TB_S / 1e6, self.tflop() / RATE_TFLOPS * 1e6)

    def tflop(self) -> float:
        """Of the products that are attended to."""
        pairs = self.tokens * self.filled + self.tokens * (self.tokens + 1) / 2
        if self.window is not None:
            pairs = sum(min(self.window, self.filled + i + 1) for i in range(self.tokens))
        return 4 * D * HEADS * self.key.shape[0] * pairs / 1e12


def parts_us(case: Case) -> dict[str, float]:
    """Of the launches of the kernel's path, one by one."""
    c = case.call
    empty = case.filled == 0
    if c.stored is None:
        to = prefill.numbers(c, empty)
        return dict(append_us=0.0, dequantize_us=0.0, attention_us=timed_us(lambda: prefill.attend(c, to)))
    to = append.memory(c, empty, c.format is not None and c.format.exact)
    old = 0.0 if empty else timed_us(lambda: append.dequantize(c, to))
    return dict(append_us=timed_us(lambda: append.append(c, to)), dequantize_us=old, attention_us=timed_us(lambda: prefill.attend(c, to)))


def whos(name: str, tokens: int, filled: int, batch: int, device: str) -> list[str]:
    found = [TRITON] if device == "cuda" else []
    if device == "cuda" and filled and tokens * HEADS // KV_HEADS <= ONE_LAUNCH_ROWS:
        found.append(ONE)
    # Over a mask, which of a large prompt takes most of a second and of the memory.
    if device == "cpu" or (filled == 0 and name != "nvfp4") or (filled + tokens) * tokens * batch <= 8192**2:
        found.append(APART)
    return found + [SDPA] * (name == formats.DENSE)


def measure(args: argparse.Namespace, device: str) -> list[dict]:
    tolerance = cached_attention.CONTRACT.tolerance[torch.bfloat16 if device == "cuda" else torch.float32]
    rows, wrong = [], []
    for (tokens, filled, batch), name in itertools.product(args.cases, args.kv):
        for who in whos(name, tokens, filled, batch, device):
            if who == SDPA and args.window is not None:
                continue
            case = Case(name, tokens, filled, batch, args.window, device)  # a new one: a run before has turned the ring of exact tokens
            call = lambda case=case, who=who: case.run(who)  # noqa: E731
            error = case.error(call())
            whole = timed_us(call) if device == "cuda" else eager_us(call)
            found = dict(append_us=0.0, dequantize_us=0.0, attention_us=0.0) | (parts_us(case) if who == TRITON else {})
            parts = case.tile.parts if who == TRITON else 0
            sizes = dict(kv=name, tokens=tokens, filled=filled, batch=batch, heads=HEADS, kv_heads=KV_HEADS, d=D, window=args.window or 0, who=who, parts=parts)
            times = {key: round(us, 1) for key, us in found.items()} | dict(whole_us=round(whole, 1), eager_us=round(eager_us(call), 1))
            rate = case.tflop() / (found["attention_us"] or whole) * 1e6
            rows.append(dict(machine(), **sizes, **times, floor_us=round(case.floor_us(), 1), tflops=round(rate, 1), error=f"{error:.2e}"))
            print(
                f"{name:5} {tokens:5} tokens behind {filled:5}, batch {batch}: {who:25} append {times['append_us']:7.1f}, old {times['dequantize_us']:6.1f}, "
                f"attention {times['attention_us']:8.1f} ({parts:2} parts, {rate:5.1f} TFLOPS, floor {case.floor_us():.1f}), whole {times['whole_us']:8.1f} us, "
                f"eager {times['eager_us']:8.1f}, error {error:.1e}",
                flush=True,
            )
            if not error <= 3 * tolerance:
                wrong.append((name, tokens, filled, batch, who, error))
            del case, call
        if device == "cuda":
            torch.cuda.empty_cache()
    if wrong:
        raise SystemExit(f"wrong results, the limit is {3 * tolerance:.1e}: {wrong}")
    return rows


def programs(t: PrefillConfig, tokens: int, batch: int) -> int:
    sets, rows = (KV_HEADS, tokens * HEADS // KV_HEADS) if t.packed else (HEADS, tokens)
    return batch * sets * -(-rows // t.block_m) * t.parts


def sweep(args: argparse.Namespace) -> list[dict]:
    """Attention alone, every tile; the best four printed. Of few tokens behind others rows of all heads of a KV head, and several numbers of parts."""
    rows = []
    many = [PrefillConfig(*t) for t in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))]
    few = [PrefillConfig(*t) for t in itertools.product((32, 64, 128), (64,), (4, 8), (2, 3), (True,), (1, 2, 4, 8, 16, 24, 32, 48, 64))]
    for (tokens, filled, batch), name in itertools.product(args.cases, args.kv):
        case = Case(name, tokens, filled, batch, args.window, "cuda")
        c, empty, found = case.call, filled == 0, []
        to = prefill.numbers(c, empty)
        default = case.tile
        most = 4 * host.processors(c.query.device)
        tiles = [t for t in few if t.parts == 1 or programs(t, tokens, batch) <= most] if tokens <= 256 and filled else many
        for tile in dict.fromkeys((default, *tiles)):
            try:
                us = timed_us(lambda tile=tile, c=c, to=to: prefill.attend(c, to, tile))
            except Exception as failure:  # a candidate that does not fit is reported, not fatal
                print(f"{tile}: {str(failure)[:100]}", flush=True)
                continue
            found.append((us, tile))
            rows.append(dict(machine(), kv=name, tokens=tokens, filled=filled, batch=batch, us=round(us, 1), tile=str(tile)))
        print(f"{name} {tokens} behind {filled}, batch {batch}: default {found[0][0]:.1f} us {default}", flush=True)
        for us, tile in sorted(found, key=lambda f: f[0])[:4]:
            print(f"  {us:9.1f} us, {case.tflop() / us * 1e6:.1f} TFLOPS {tile}", flush=True)
        del case, c, to
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", nargs="+", choices=formats.NAMES, default=list(formats.NAMES))
    parser.add_argument(
        "--cases", nargs="+", type=lambda s: tuple(map(int, s.split(","))), default=list(dict.fromkeys((*CASES, *FEW))), help="tokens,tokens before,batch"
    )
    parser.add_argument("--few", action="store_true", help="only few tokens behind many")
    parser.add_argument("--window", type=int)
    parser.add_argument("--sweep", action="store_true", help="search the tiles")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.smoke:
        torch.set_num_threads(1)
        args.cases = [(40, 0, 2), (20, 70, 1)]
    if args.few:
        args.cases = list(FEW)
    rows = sweep(args) if args.sweep else measure(args, "cpu" if args.smoke else "cuda")
    if args.out or not args.sweep:
        save(rows, "cached_prompt.csv", args.out, args.smoke)


if __name__ == "__main__":
    main()
