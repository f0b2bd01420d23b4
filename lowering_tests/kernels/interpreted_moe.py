"""Run by test_moe_kernels.py in a process of its own: the MoE kernels in Triton's interpreter against float64, on CPU tensors.

Prints one JSON object per case: ``{"case", "error", "bound"}``. Kept out, as in interpreted.py: bfloat16 ``tl.dot`` and the rounding to
bfloat16, both wrong there; so bfloat16 occurs as an input of the decode kernels only.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from unittest import mock

from lowering_tests.kernels import interpreted as common  # switches the interpreter on

import torch  # isort: skip

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import forms, host
from fp4_inductor.kernels.moe import decode as moe_decode
from fp4_inductor.kernels.moe import grouped as moe_grouped
from fp4_inductor.kernels.moe import many
from fp4_inductor.kernels.moe.decode import DecodeConfig
from fp4_inductor.kernels.moe.grouped import GroupedConfig
from fp4_inductor.kernels.moe.many import ManyConfig
from fp4_inductor.kernels.moe.routing import route
from fp4_inductor.ops import moe as contract
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.moe_call import ExpertWeight, MoeCall

LAUNCH = {"decode": moe_decode.decode, "grouped": moe_grouped.grouped}
TILES = (GroupedConfig(16, 32, 64, 4, 2), GroupedConfig(32, 16, 32, 4, 2))


report, distance = common.report, common.distance


def _float32_out(*shape, dtype, **options):
    """As interpreted.py's, E4M3 as float32, too; an unwritten index is beyond every array."""
    if dtype == torch.int32:
        return torch.full(shape, 1 << 30, dtype=dtype, **options)
    return common._float32_out(*shape, dtype=torch.float32 if dtype == torch.float8_e4m3fn else dtype, **options)


@contextlib.contextmanager
def interpreted(arch=80):
    with (
        mock.patch.object(host, "arch", return_value=arch),
        mock.patch.object(forms, "ASM", False),
        mock.patch.object(moe_decode, "constants_of", lambda *a: {**_decode(*a), "CVT": False}),
        mock.patch.object(torch, "empty", _float32_out),
    ):
        yield


_decode = moe_decode.constants_of


def weight(e, n, k, pattern=None):
    """Dense, or 2:4-sparse of one pattern everywhere, or ``"mixed"``."""
    w = torch.randn(e, n, k) / k**0.5
    if pattern is None:
        return ExpertWeight.of_parts(nvfp4.quantize(w))
    index = torch.randint(0, 6, (e, n, k // 4)) if pattern == "mixed" else torch.full((e, n, k // 4), pattern)
    return ExpertWeight.of_parts(sparse24.quantize_sparse24(w, sparse24.mask_of(sparse24.pack_meta(torch.tensor(sparse24.NIBBLES)[index].to(torch.uint8)))))


def layer(
    t, h, inner, e, k, act=None, dtype=torch.float32, gated=True, biased=False, on_input=False, table=None, width=None, ids=None, sparse=(None, None), two=False
):
    """``two``: gate and up of an expert have a global scale each, a decade apart."""
    act = act or Activation()
    rows = 2 * inner if gated else inner
    biases = (torch.randn(e, rows), torch.randn(e, width or h)) if biased else (None, None)
    ids = torch.randint(0, e, (t, k), dtype=torch.int32) if ids is None else ids
    up, down = (replace(w, bias=b) for w, b in zip((weight(e, rows, h, sparse[0]), weight(e, width or h, inner, sparse[1])), biases, strict=True))
    if two:
        up = replace(up, global_scale=(up.global_scale[:, None] * torch.tensor([0.5, 5.0])).flatten())
    return MoeCall(torch.randn(t, h).to(dtype), ids, torch.rand(t, k), up, down, act, on_input, table)


def exact(c: MoeCall) -> torch.Tensor:
    gate_up = replace(c.gate_up, global_scale=c.gate_up.global_scale.view(-1, 2)) if c.two_scales else c.gate_up
    return contract.reference(replace(c, hidden=c.hidden.float(), gate_up=gate_up))


def both(name: str, c: MoeCall, decode=True, tiles=TILES, rows=32) -> None:
    want = exact(c)
    with interpreted():
        if decode:
            wide = (DecodeConfig(rows, 128, 2), DecodeConfig(64, 128, 2))  # the interpreter pays by the program
            report(f"decode {name}", distance(moe_decode.decode(c, *wide), want), 1e-3)  # activations become half precision inside
        if c.hidden.dtype != torch.bfloat16:
            for tile in tiles:
                bound = 4e-6 if c.hidden.dtype == torch.float32 else 1e-3
                report(f"grouped {name} {tile.block_m}", distance(moe_grouped.grouped(c, tile), want), bound)


ACTS = {
    "silu": Activation(),
    "gpt_oss": Activation("swiglu_oai", 1.702, 0.7, True),
    "concatenated gpt_oss": Activation("swiglu_oai", 1.702, 0.7),
    "deepseek_v4": Activation("silu", limit=0.5),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "relu": Activation("relu", limit=1.0),
}


def formulas():
    for i, (name, act) in enumerate(ACTS.items()):
        both(f"{name} bias {i % 2 > 0}", layer(3, 80, 48, 4, 2, act, biased=i % 2 > 0), tiles=TILES[:1])
    for name, act in (("relu2", Activation("relu2")), ("quick_gelu", Activation("silu", 1.702))):
        both(f"no gate {name}", layer(3, 80, 48, 4, 2, act, gated=False, biased=True), tiles=TILES[:1])


def shapes():
    for t, h, inner, e, k, width in (
        (1, 272, 16, 3, 2, None),
        (1, 528, 144, 2, 1, 33),
        (3, 16, 80, 9, 4, 70),
        (2, 80, 96, 1, 3, None),
        (40, 48, 32, 5, 2, None),
    ):
        for dtype in (torch.bfloat16, torch.float32) if h == 16 else (torch.float16,):
            c = layer(t, h, inner, e, k, dtype=dtype, width=width)
            both(f"{(t, h, inner, e, k, width)} {dtype}", c, decode=t < 10, tiles=TILES if inner == 80 else TILES[:1])
    for h, inner, k in ((1168, 16, 1), (48, 144, 20)):  # more steps than are unrolled
        both(f"{(h, inner, k)} in a loop", layer(1, h, inner, 3, k, dtype=torch.bfloat16), rows=64 if inner > 64 else 32)


def routings():
    """Adversarial: every id, none, one expert for all, the same expert twice, more choices than experts, sentinels with NaN weights."""
    ids = {
        "none is an expert": torch.full((4, 2), -1),
        "beyond the last": torch.tensor([[6, 0], [7, -5], [2**40, 5], [-(2**40), 1]]),
        "one for all": torch.full((5, 2), 3),
        "in descending order": torch.tensor([[5, 4], [3, 2], [1, 0]]),
        "more choices than experts": torch.randint(0, 6, (2, 9)),
        "the last only": torch.tensor([[5], [5], [5]]),
        "first and last": torch.tensor([[0, 5], [5, 0], [0, 0]]),
    }
    for name, choice in ids.items():
        c = layer(*choice.shape[:1], 48, 32, 6, choice.shape[1], ids=choice)
        c.expert_weights[(choice < 0) | (choice > 5)] = float("nan")
        both(f"routing: {name}", c, tiles=TILES[:1])
    table = torch.tensor([-1, 0, 3, 2, -1, 1, 5, 99])
    for on_input in (False, True):
        c = layer(5, 48, 32, 6, 3, ids=torch.randint(-2, 12, (5, 3)), table=table, on_input=on_input, biased=True)
        both(f"routing: map, weight on input {on_input}", c, tiles=TILES[:1])
    for seed in range(4):
        random.seed(seed)
        e, k, t = random.choice((1, 2, 7, 16)), random.choice((1, 3, 8)), random.choice((1, 6))
        c = layer(t, 32, 16, e, k, ids=torch.randint(-1, e + 1, (t, k)))
        both(f"routing: random E{e} k{k} T{t}", c, tiles=TILES[seed % 2 :][:1])


def metadata():
    """The routing kernel alone, against torch.sort; P beyond one block; every BLOCK_M."""
    for e, p, block_m in ((5, 40, 16), (1, 7, 16), (6, 1500, 32), (3, 2049, 64), (9, 3, 64)):
        ids = torch.randint(-1, e + 1, (p, 1))
        ids[torch.rand(p, 1) < 0.2] = 0  # uneven
        c = layer(1, 16, 16, e, 1, ids=torch.zeros(1, 1, dtype=torch.int32))
        c = replace(c, expert_ids=ids, expert_weights=torch.rand(p, 1))
        with interpreted():
            r = route(c, block_m)
        valid = torch.where((ids >= 0) & (ids < e), ids, e).flatten()
        order = torch.argsort(valid, stable=True)[: int((valid < e).sum())]
        wrong = int(not torch.equal(r.order[: order.numel()].long(), order))
        counts = torch.bincount(valid, minlength=e + 1)[:e]
        wrong += int(not torch.equal(r.ends.long(), counts.cumsum(0)))
        wrong += int(not torch.equal(r.place.long()[order], torch.arange(order.numel())))
        seen = torch.zeros(p, dtype=torch.int64)
        for expert, start in zip(r.tile_expert.tolist(), r.tile_start.tolist(), strict=True):
            if expert >= 0:
                seen[start : min(start + block_m, int(r.ends[expert]))] += 1
                wrong += int((valid[r.order[start : min(start + block_m, int(r.ends[expert]))].long()] != expert).sum())
        wrong += int((seen[: order.numel()] != 1).sum()) + int(seen[order.numel() :].sum())
        report(f"route E{e} P{p} tile {block_m}", float(wrong), 0.0)


def rows_stay_apart():
    c = layer(4, 48, 32, 5, 2)
    wide = {"decode": (DecodeConfig(32, 128, 2), DecodeConfig(64, 128, 2)), "grouped": ()}
    with interpreted():
        clean = {f: LAUNCH[f](c, *tiles) for f, tiles in wide.items()}
        for bad in (float("nan"), float("inf")):
            c.hidden[2, 5] = bad
            for f, want in clean.items():
                got = LAUNCH[f](c, *wide[f])
                others = torch.arange(4) != 2
                report(f"apart {f} {bad}", float((got[others] != want[others]).sum() + torch.isfinite(got[2]).sum()), 0.0)
    # A NaN expert that only an invalid pair names is not read; one that is named reaches its tokens only.
    c = layer(4, 48, 32, 5, 2, ids=torch.tensor([[1, 2], [2, 3], [-1, 1], [4, 3]]))
    with interpreted():
        want = {f: LAUNCH[f](c) for f in ("decode", "grouped")}
        c.gate_up.global_scale[0] = float("nan")
        c.down.global_scale[0] = float("nan")
        for f in want:
            report(f"apart unused expert {f}", float((LAUNCH[f](c) != want[f]).sum()), 0.0)
        c.down.global_scale[4] = float("nan")
        for f in want:
            got = LAUNCH[f](c)
            report(f"apart NaN expert {f}", float((got[:3] != want[f][:3]).sum() + torch.isfinite(got[3]).sum()), 0.0)


def sparse_experts():
    """2:4: each of the six patterns (positions of a group differ by powers of two), tails of every loop, one weight sparse and the other not."""
    for pattern in range(6):
        c = layer(2, 64, 32, 3, 2, sparse=(pattern, pattern))
        c.hidden.mul_(2.0 ** (torch.arange(64) % 4))
        both(f"2:4 pattern {pattern}", c, tiles=TILES[:1])
    for t, h, inner, e, k, width, act, sparse in (
        (1, 288, 32, 3, 2, None, "silu", ("mixed", "mixed")),
        (1, 32, 160, 2, 1, 33, "gelu", ("mixed", "mixed")),
        (1, 96, 64, 4, 5, 70, "gpt_oss", ("mixed", "mixed")),
        (1, 544, 96, 1, 2, None, "deepseek_v4", ("mixed", "mixed")),
        (2, 96, 48, 4, 2, None, "concatenated gpt_oss", ("mixed", None)),
        (2, 80, 64, 4, 2, None, "silu", (None, "mixed")),
    ):
        for dtype in (torch.float16, torch.bfloat16) if h == 96 and inner == 64 else (torch.float32,):
            c = layer(t, h, inner, e, k, ACTS[act], dtype, biased=act == "gpt_oss", width=width, sparse=sparse)
            both(f"2:4 {(t, h, inner, e, k, width)} {dtype} {sparse}", c, tiles=TILES[1:] if inner == 48 else TILES[:1])
    c = layer(4, 64, 32, 6, 2, ids=torch.tensor([[6, 0], [7, -5], [2**40, 5], [-1, 1]]), sparse=("mixed", "mixed"), on_input=True)
    c.expert_weights[(c.expert_ids < 0) | (c.expert_ids > 5)] = float("nan")
    both("2:4 beyond the last", c, tiles=TILES[:1])
    c = layer(2, 64, 32, 5, 2, gated=False, act=Activation("relu2"), sparse=("mixed", "mixed"))
    both("2:4 no gate", c, tiles=TILES[:1])


def many_tokens():
    """The transient-weight path: rows in, between and out, the host's parts; the grouped product in plain PyTorch, nothing rounded to E4M3."""

    def product(rows, weight, routing, dtype):
        x, row_scale = rows
        codes, scale, g, meta = weight.qdata, weight.scale, weight.global_scale, weight.meta
        out = x.new_full((x.shape[0], codes.shape[1]), float("nan"))  # torch._grouped_mm leaves rows without an expert unwritten
        codes = codes if meta is None else sparse24.decompress(codes, meta)
        if g.dim() == 2:  # of rows
            w = nvfp4.dequantize(codes.unsqueeze(2), scale.unsqueeze(2), g, torch.float32).squeeze(2)
        else:
            w = nvfp4.dequantize(codes, scale, g, torch.float32)
        start = 0
        for e, end in enumerate(routing.ends.tolist()):
            mine = slice(start, end)
            if row_scale is not None and start < end:
                largest = x[mine].abs().amax(1)
                assert bool(((largest - 448).abs() < 1e-3).logical_or(largest == 0).all()), largest
            out[mine] = (x[mine] if row_scale is None else x[mine] * row_scale[mine, None]) @ w[e].t()
            start = end
        return out

    mapped = torch.tensor([-1, 0, 3, 2, -1, 1, 4, 99])
    layers = (
        (ACTS["silu"], True, False, False, (None, None), None),
        (ACTS["silu"], True, False, False, (None, None), None, True),
        (ACTS["gpt_oss"], True, True, False, ("mixed", None), mapped, True),
        (ACTS["gpt_oss"], True, True, False, ("mixed", None), None),
        (ACTS["concatenated gpt_oss"], True, True, False, (None, None), mapped),
        (ACTS["silu"], True, True, True, ("mixed", "mixed"), mapped),
        (Activation("relu2"), False, True, False, (None, None), None),
    )
    ways = ((False, 1 << 30, 0), (True, 4096, 16), (True, 1 << 30, 0))  # whole; in parts, and every loop over a row
    for (act, gated, biased, on_input, sparse, table, *two), (fp8, limit, block) in common.some(itertools.product(layers, ways), 2):
        inner = 48 if sparse[1] is None else 64
        more = dict(ids=torch.randint(-1, 8, (30, 3)), sparse=sparse, table=table, two=bool(two))
        c = layer(30, 64, inner, 5, 3, act, gated=gated, biased=biased, on_input=on_input, **more)
        c.expert_weights[(c.expert_ids < 0) | (c.expert_ids > 4)] = float("nan") if table is None else 0.5
        steps = mock.patch.object(many, "whole_row", lambda columns, b=block: (b, False, 1) if b else _whole_row(columns))
        with interpreted(), steps, mock.patch.object(many, "TRANSIENT_BYTES", limit):
            got = many._many(c, product, fp8)
        form = f"{act.name} gate {gated} 2:4 {sparse} bias {biased} on input {on_input} map {table is not None} two scales {bool(two)}"
        report(f"many {form} fp8 {fp8}", distance(got, exact(c)), 4e-6)
    c = layer(6, 64, 48, 5, 2, ids=torch.randint(0, 5, (6, 2)))
    with interpreted():
        clean = many._many(c, product, False)
        c.hidden[2, 5] = float("nan")
        got = many._many(c, lambda *a: product((a[0][0], None), *a[1:]), True)  # scales left out: rows stay apart, whatever their size
    others = torch.arange(6) != 2
    report(
        "many NaN stays in its token", float(not (torch.isfinite(got[others]).all() and torch.isfinite(clean).all() and not torch.isfinite(got[2]).any())), 0.0
    )


def products_of_tiles():
    """The grouped product alone: tails of every kind, tiles that end inside an expert, empty slots; rows without an expert stay unwritten."""
    for t, h, inner, e, k, tile in (
        (30, 64, 48, 5, 3, ManyConfig(16, 32, 32, 4, 2, 2)),
        (30, 80, 40, 5, 3, ManyConfig(16, 32, 64, 4, 2, 3)),
        (3, 80, 208, 9, 1, ManyConfig(16, 64, 32, 4, 2, 8)),
    ):
        c = layer(t, h, 48, e, k, ids=torch.randint(-1, e + 1, (t, k)))
        w, g = torch.randn(e, inner, h), torch.rand(e, inner) if inner == 40 else torch.rand(e)  # of rows, too
        with interpreted():
            routing = route(c, tile.block_m)
            x, row_scale = many.sorted_rows(c, routing, True)
            y = many.multiply_fp8((x, row_scale), w, g, routing, torch.float32, tile)
        ends = routing.ends.tolist()
        want = torch.cat(
            [(x[a:b] * row_scale[a:b, None]).double() @ w[i].double().T * g[i] * 8 for i, (a, b) in enumerate(zip([0, *ends], ends, strict=False))]
        )
        left_alone = bool(y[ends[-1] :].isnan().all())
        report(f"product {(t, h, inner, e, k)} {tile}", distance(y[: ends[-1]], want) if left_alone else 1.0, 2e-6)


def two_scales():
    """Gate and up of an expert under a global scale each: halves, interleaved rows, 2:4, the transient weight and its product."""
    for name, sparse, on_input in (("silu", (None, None), False), ("gpt_oss", (None, None), True), ("silu", ("mixed", None), False)):
        c = layer(3, 96, 48, 4, 2, ACTS[name], biased=on_input, on_input=on_input, sparse=sparse, two=True)
        both(f"two scales {name} 2:4 {sparse}", c, tiles=TILES[:1])
    both("two scales, a tail", layer(1, 272, 16, 3, 2, two=True), tiles=TILES[1:])
    for interleaved in (False, True):
        c = layer(4, 64, 48, 5, 2, ids=torch.tensor([[1, 3]] * 4), two=True)
        codes, scale, g = c.gate_up.qdata, c.gate_up.scale, c.gate_up.global_scale
        rows = contract.scale_of_rows(g.view(-1, 2), 96, interleaved)
        with interpreted(), mock.patch.object(torch.cuda, "device", contextlib.nullcontext):
            routing = route(c, 16)
            w = many._transient(ExpertWeight(codes, scale, rows), rows, torch.float32, routing.ends)
        want = nvfp4.dequantize(codes.unsqueeze(2), scale.unsqueeze(2), rows, torch.float32).squeeze(2)
        wrong = float((w[[1, 3]] != want[[1, 3]]).sum() + (~w[[0, 2, 4]].isnan()).sum())  # of experts without tokens nothing is written
        report(f"two scales, transient weight, interleaved {interleaved}", wrong, 0.0)


_whole_row = many.whole_row


if __name__ == "__main__":
    torch.manual_seed(0)
    for cases in (formulas, shapes, routings, metadata, rows_stay_apart, many_tokens, products_of_tiles, sparse_experts, two_scales):
        cases()
