"""One MoE layer: fp4.moe by dispatch row against Transformers' bf16 experts: ``python benchmarks/moe.py [--tokens 1 4 ...] [--layers mixtral]``.

Each layer in dense NVFP4 and, where few tokens decode (``--sparse-tokens``), with 2:4-sparse experts, whose goal is 0.85 of the dense time.

``--ranks N``: one rank's part of expert parallelism, which has 1 / N of the experts and sees every token.

Cold L2, CUDA-graph replay, medians; every call of a pass routes to other experts. ``--sweep`` times the tiles of the decode and grouped
kernels instead. Other libraries are timed where they can be imported (:mod:`moe_peers`). ``--cpu`` times small layers on this CPU (CPU time of a call, the fastest of
``CPU_CALLS``: on a busy machine the clock on the wall says little). ``--smoke`` runs two tiny layers on a CPU, without a graph: it shows that the script works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import moe_peers
import torch
from timing import graph_us, machine, save
from torch import Tensor

import fp4_inductor  # noqa: F401
from fp4_inductor.config import dispatch_config
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels.select import Counts, describe, moe_op, plan
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.moe_call import ExpertWeight, MoeCall

SILU = Activation()
TOKENS = (1, 4, 8, 32, 128, 1024, 4096)
ROUTINGS = 16  # calls a pass
SPARSE_TOKENS, SPARSE_GOAL = (1, 4), 0.85  # of the dense time
Parts = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # of gate_up and of down, as their storage orders them


@dataclass(frozen=True)
class Layer:
    """``goals``: microseconds asked for at TOKENS on an H200. ``ranks``: the experts lie on so many, and this is the first of them."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    act: Activation = SILU
    biased: bool = False
    goals: tuple[float, ...] = ()
    ranks: int = 1

    @property
    def held(self) -> int:
        return self.experts // self.ranks

    def of_ranks(self, ranks: int) -> Layer:
        return self if ranks == 1 else replace(self, name=f"{self.name} 1/{ranks}", goals=(), ranks=ranks)


LAYERS = (
    Layer("qwen3_30b", 128, 8, 2048, 768, goals=(10.5, 27, 46, 90, 105, 200, 620)),
    Layer("qwen3_next", 512, 10, 2048, 512, goals=(10.5, 23, 44, 130, 240, 330, 720)),
    Layer("mixtral", 8, 2, 4096, 14336, goals=(54, 150, 215, 235, 330, 1200, 3900)),
    Layer("gpt_oss", 32, 4, 2880, 2880, Activation("swiglu_oai", 1.702, 7.0, True), True, (21, 68, 95, 135, 180, 520, 1450)),
)
CPU_LAYERS = (
    Layer("cpu_small", 32, 4, 512, 256), Layer("cpu_middle", 32, 4, 1024, 512), Layer("cpu_many", 128, 8, 1024, 256), Layer("cpu_few", 8, 2, 1024, 1024),
)  # fmt: skip
CPU_TOKENS, CPU_CALLS = (1, 8, 64, 256), 32
TINY = (Layer("tiny", 8, 2, 64, 32), Layer("tiny_gpt_oss", 4, 2, 64, 32, Activation("swiglu_oai", 1.702, 7.0, True), True))


def packed(layer: Layer, device: str, sparse: bool = False) -> Parts:
    """Random codes, patterns and plausible scales: quantizing gigabytes of noise would only take time."""
    return _packed(2 * layer.inner, layer.hidden, layer, device, sparse), _packed(layer.hidden, layer.inner, layer, device, sparse)


def _packed(n: int, k: int, layer: Layer, device: str, sparse: bool) -> tuple[Tensor, ...]:
    def codes(per_byte: int) -> Tensor:
        return torch.randint(0, 256, (layer.held, n, k // per_byte), dtype=torch.uint8, device=device)

    scale = torch.randint(0x28, 0x40, (layer.held, n, k // 16), dtype=torch.uint8, device=device).view(nvfp4.SCALE_DTYPE)
    scales = scale, (torch.rand(layer.held, device=device) + 0.5) / k**0.5 / 8
    if not sparse:
        return codes(2), *scales
    legal = torch.tensor([a | b << 4 for a in sparse24.NIBBLES for b in sparse24.NIBBLES], dtype=torch.uint8, device=device)
    return codes(4), legal[codes(8).int() % len(legal)], *scales


def routings(layer: Layer, tokens: int, device: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Distinct experts a token, uniformly; weights that sum to one."""
    out = []
    for _ in range(count):
        scores = torch.rand(tokens, layer.experts, device=device)
        weights, ids = scores.topk(layer.top_k)
        out.append((ids, weights / weights.sum(-1, keepdim=True)))
    return out


class Case:
    """Arguments of one layer at one number of tokens, and how to time a call ``f(i)``."""

    def __init__(self, layer: Layer, parts: Parts, tokens: int, device: str):
        self.layer, self.parts, self.device = layer, parts, device
        self.dtype = torch.bfloat16
        self.x = torch.randn(tokens, layer.hidden, device=device).to(self.dtype)
        self.routing = routings(layer, tokens, device, ROUTINGS if tokens <= 128 else 4)
        everywhere = torch.arange(layer.experts, dtype=torch.int32, device=device)
        self.map = None if layer.ranks == 1 else everywhere.where(everywhere < layer.held, -1)
        shapes = (2 * layer.inner, layer.hidden)
        self.biases = tuple(torch.randn(layer.held, n, device=device).to(self.dtype) if layer.biased else None for n in shapes)

    def time(self, call: Callable[[int], object]) -> float:
        if self.device == "cuda":
            return graph_us(call, len(self.routing))
        call(0)
        fastest = float("inf")
        for i in range(CPU_CALLS):
            start = time.process_time()
            call(i % len(self.routing))
            fastest = min(fastest, time.process_time() - start)
        return fastest * 1e6

    def call(self, i: int) -> MoeCall:
        return MoeCall(self.x, *self.routing[i], *map(ExpertWeight.of_parts, self.parts, self.biases), self.layer.act, expert_map=self.map)  # type: ignore[call-arg]

    def ours(self, i: int) -> Tensor:
        return torch.ops.fp4.moe(*self.call(i).flat())

    def error(self, y: Tensor | None = None) -> float:
        """Of ``y`` (ours) against float64, over at most 64 tokens."""
        some = slice(0, 64)
        call = self.call(0)
        few = replace(call, hidden=self.x[some].float(), expert_ids=call.expert_ids[some], expert_weights=call.expert_weights[some])
        want = contract.reference(few).double()
        got = (self.ours(0) if y is None else y)[some].double()
        return float((got - want).norm() / want.norm())

    def kernel(self) -> str:
        layer = self.layer
        op = moe_op(*(ExpertWeight.of_parts(parts).meta for parts in self.parts))
        options = plan(describe(op, self.x.device, self.dtype, layer.hidden, layer.hidden, "auto", counts=Counts(layer.experts)), dispatch_config())
        return options.pick(self.routing[0][0].numel()).kernel


def dense_peers(layer: Layer, case: Case) -> dict[str, float]:
    """Microseconds of Transformers' own implementations on bf16 weights of the same shape; empty where they do not fit."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def stack(n, k):
        return torch.randn(layer.experts, n, k, device=case.device, dtype=case.dtype) / k**0.5

    owner = types.SimpleNamespace(
        gate_up_proj=stack(2 * layer.inner, layer.hidden), down_proj=stack(layer.hidden, layer.inner), num_experts=layer.experts, has_gate=True,
        has_bias=layer.biased, is_transposed=False, is_concatenated=not layer.act.interleaved, gate_up_proj_bias=case.biases[0], down_proj_bias=case.biases[1],
        has_post_expert_norm=False, _is_expert_parallel=False, _apply_gate=lambda z: layer.act(z, layer.inner),
    )  # fmt: skip
    out = {}
    for name in ("batched_mm", "grouped_mm"):
        if name == "batched_mm" and case.routing[0][0].numel() * layer.inner * layer.hidden * 6 > (60e9 if case.device == "cuda" else 1e8):
            continue  # it gathers every weight of every pair
        forward = torch.compile(ALL_EXPERTS_FUNCTIONS[name]) if case.device == "cuda" else ALL_EXPERTS_FUNCTIONS[name]
        out[name] = case.time(lambda i, f=forward: f(owner, case.x, *case.routing[i]))
    torch.compiler.reset()
    return out


def fp4_peers(builds: dict[str, Callable], layer: Layer, case: Case, built: dict[str, object]) -> dict[str, tuple[float, float]]:
    """Microseconds and error of other libraries on the same codes and scales. ``built``: kept from one number of tokens to the next."""
    out = {}
    for name, build in builds.items():
        try:
            if name not in built or layer.biased:  # every case has biases of its own
                built[name] = build((*case.parts[0], *case.parts[1]), case.biases, lambda z: layer.act(z, layer.inner).to(z.dtype))
            calls = [built[name].prepare(case.x, *routing) for routing in case.routing]
            us = case.time(lambda i, c=calls: c[i]())
            out[name] = (us, case.error(calls[0]()))
        except Exception as error:  # whatever another library raises: its row says so, the others go on
            print(f"{name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    return out


@torch.no_grad()
def measure(layers: tuple[Layer, ...], tokens: tuple[int, ...], device: str, peers: bool, sparse_tokens: tuple[int, ...] = ()) -> Iterator[dict]:
    builds, missing = moe_peers.available(device) if peers else ({}, {})
    for name, why in missing.items():
        print(f"{name}: left out ({why})", flush=True)
    for layer in layers:
        times: dict[int, float] = {}
        parts, built = packed(layer, device), {}
        for t in tokens:
            case = Case(layer, parts, t, device)
            times[t] = case.time(case.ours)
            others = fp4_peers(builds, layer, case, built)
            dense = dense_peers(layer, case) if peers else {}
            yield _row(case, "nvfp4", times[t], layer.goals[TOKENS.index(t)] if layer.goals and t in TOKENS else None, dense, others)
        parts = packed(layer, device, sparse=True)
        for t in sparse_tokens:
            case = Case(layer, parts, t, device)
            yield _row(case, sparse24.NAME, case.time(case.ours), round(SPARSE_GOAL * times[t], 2) if t in times else None, {}, {})
        del parts


def _row(case: Case, weights: str, us: float, goal: float | None, dense: dict[str, float], others: dict[str, tuple[float, float]]) -> dict:
    layer, t = case.layer.name, len(case.x)
    row = dict(
        where(case.device), layer=layer, weights=weights, tokens=t, kernel=case.kernel(), us=round(us, 2), goal_us=goal, error=f"{case.error():.1e}",
        **{f"bf16_{n}_us": round(dense[n], 2) if n in dense else "" for n in ("batched_mm", "grouped_mm")},
    )  # fmt: skip
    for name in moe_peers.PEERS:
        found = others.get(name)
        row |= {f"{name}_us": round(found[0], 2) if found else "", f"{name}_error": f"{found[1]:.1e}" if found else ""}
    row["speedup"] = round(min(dense.values()) / us, 2) if dense else ""
    print(f"{layer:12} {weights:14} T={t:5} {row['kernel']:36} {us:9.2f} us (goal {goal})  bf16 {dense}  {others}  error {row['error']}", flush=True)
    return row


@torch.no_grad()
def sweep(layers: tuple[Layer, ...], tokens: tuple[int, ...]) -> Iterator[dict]:
    """Every tile of the kernel that dispatch would choose, the fastest first."""
    from fp4_inductor.kernels.moe import decode as few
    from fp4_inductor.kernels.moe import grouped as several

    ups, downs = (
        [few.DecodeConfig(*c) for c in itertools.product(rows, (256, 512, 1024, 2048), (1, 2, 4, 8)) if 1024 <= c[1] * c[2] <= 8192]
        for rows in ((16, 32), (4, 8))
    )
    decode = [*((c, None) for c in ups), *((None, c) for c in downs)]  # one kernel's tile at a time
    grouped = [several.GroupedConfig(*c) for c in itertools.product((16, 32, 64), (32, 64, 128), (64, 128), (4, 8), (2, 3, 4))]
    for layer in layers:
        parts = packed(layer, "cuda")
        for t in tokens:
            case = Case(layer, parts, t, "cuda")
            many = case.routing[0][0].numel() > max(4, 3 * layer.experts)
            found = []
            for tile in grouped if many else decode:
                calls = [case.call(i) for i in range(len(case.routing))]
                try:
                    us = graph_us(lambda i, c=calls, s=tile: several.grouped(c[i], s) if many else few.decode(c[i], *s), len(calls))
                except Exception as error:  # a tile that does not fit the architecture
                    print(layer.name, t, tile, type(error).__name__, str(error)[:100], flush=True)
                    continue
                found.append(dict(machine(), layer=layer.name, tokens=t, tile=str(tile), us=round(us, 2)))
            found.sort(key=lambda r: r["us"])
            print(layer.name, t, [(r["us"], r["tile"]) for r in found[:3]], flush=True)
            yield from found


def where(device: str) -> dict[str, str]:
    return machine() if device == "cuda" else {"gpu": "none (on a CPU)", "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--sparse-tokens", type=int, nargs="*", default=list(SPARSE_TOKENS), help="the same for 2:4-sparse experts")
    parser.add_argument("--layers", nargs="+", default=[layer.name for layer in LAYERS], choices=[layer.name for layer in LAYERS])
    parser.add_argument("--ranks", type=int, default=1, help="of expert parallelism: times the first one's part, without peers")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave Transformers' bf16 implementations and other libraries out")
    parser.add_argument("--sweep", action="store_true", help="time tiles")
    parser.add_argument("--cpu", action="store_true", help="small layers on this CPU")
    parser.add_argument("--smoke", action="store_true", help="two tiny layers on a CPU")
    parser.add_argument("--out", type=Path, help="CSV (default: results/moe.csv, or moe_sweep.csv)")
    args = parser.parse_args()
    torch.manual_seed(0)
    peers = args.peers and args.ranks == 1
    if args.smoke or args.cpu:
        layers, tokens, sparse_tokens = (TINY, (1, 4, 33), (1, 4, 33)) if args.smoke else (CPU_LAYERS, CPU_TOKENS, ())
        rows = list(measure(tuple(layer.of_ranks(args.ranks) for layer in layers), tokens, "cpu", peers, sparse_tokens))
    else:
        chosen = tuple(layer.of_ranks(args.ranks) for layer in LAYERS if layer.name in args.layers)
        rows = list(sweep(chosen, tuple(args.tokens)) if args.sweep else measure(chosen, tuple(args.tokens), "cuda", peers, tuple(args.sparse_tokens)))
    save(rows, "moe_sweep.csv" if args.sweep else "moe.csv", args.out, args.smoke or args.cpu)


if __name__ == "__main__":
    main()
