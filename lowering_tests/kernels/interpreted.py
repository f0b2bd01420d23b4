"""Run by test_interpreter.py in a process of its own: every Triton kernel in Triton's interpreter, on CPU tensors.

Prints one JSON object per case: ``{"case", "error", "bound"}``. The interpreter's own defects are kept out: its bfloat16
``tl.dot`` and its roundings to bfloat16 and to E4M3 are wrong, so bfloat16 appears as an input of the GEMV only, and the
FP8 kernels write float32, which torch then rounds.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from typing import Any
from unittest import mock

from lowering_tests import interpreter  # noqa: F401  (before anything imports Triton)

import torch  # isort: skip

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import forms, host, run
from fp4_inductor.kernels.dequantize.triton_rows import decompress_rows, dequantize_rows
from fp4_inductor.kernels.forms import Problem
from fp4_inductor.kernels.linear import gemv as dense_gemv
from fp4_inductor.kernels.linear import mid as dense_mid
from fp4_inductor.kernels.linear.gemv import GemvConfig
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.linear_fp8 import gemv as fp8_gemv
from fp4_inductor.kernels.linear_glu import gemv as glu_gemv
from fp4_inductor.kernels.quantize_rows_fp8.triton_glu_rows import quantize_glu_rows
from fp4_inductor.kernels.quantize_rows_fp8.triton_rows import quantize_rows
from fp4_inductor.kernels.router.triton_router import router_choice, router_scores
from fp4_inductor.kernels.router.two_launches import scores_tile
from fp4_inductor.kernels.sparse_linear import gemv as sparse_gemv_kernel
from fp4_inductor.kernels.sparse_linear import mid as sparse_mid_kernel
from fp4_inductor.kernels.topk.launch import tile as topk_tile
from fp4_inductor.kernels.topk.triton_rows import topk_rows
from fp4_inductor.ops import dequantize_fp8, linear, linear_fp8, linear_glu, linear_siblings, quantize_glu_rows_fp8, quantize_rows_fp8, router, topk
from fp4_inductor.ops.activation import ActivationCode, activation_code


def some(cases: Iterable, each: int) -> list[Any]:
    """Of the combinations of nested loops one in ``each``; all of them with --slow. A number that divides no inner loop's length meets every value there."""
    return list(cases)[:: 1 if os.environ.get("FP4_EVERY_CASE") else each]


def report(case: str, error: float, bound: float) -> None:
    print(json.dumps({"case": case, "error": error if error == error else 1e30, "bound": bound}), flush=True)


def distance(y, r) -> float:
    return ((y.double() - r.double()).norm() / r.double().norm().clamp_min(1e-300)).item()


def weight(n, k):
    """Every code and the whole range of scales occur, subnormal ones too."""
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    s = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37)


def _float32_out(*shape, dtype, **options):
    """For ``torch.empty`` in the launchers: unwritten elements are NaN; bfloat16 results stay float32."""
    return torch.full(shape, float("nan"), dtype=torch.float32 if dtype == torch.bfloat16 else dtype, **options)


def launched(kind, x, w, tile, bounds=()):
    with (
        mock.patch.object(host, "arch", return_value=80),
        mock.patch.object(forms, "ASM", False),
        mock.patch.object(torch, "empty", _float32_out),
    ):
        return run.by_form({"gemv": dense_gemv, "mid": dense_mid}[kind].FORM, x, w, None, bounds, tile)


def gemv(x, q, s, g, block_m, config=None):
    return launched("gemv", x, (q, s, g), config or GemvConfig(block_m, 8, 64, 4))


def mid(x, q, s, g, c):
    return launched("mid", x, (q, s, g), c)


def exact(x, q, s, g):
    return x.double() @ nvfp4.dequantize(q, s, g, torch.float32).double().T


def gemv_cases():
    for m, block_m in ((1, 1), (2, 2), (4, 4), (3, 2), (3, 4), (5, 4)):  # the last three: M tails
        for n, k in ((16, 1024), (13, 512), (8, 528), (5, 16), (11, 592)):  # aligned; N tail; K % 16 == 0 only; both
            for dtype in (torch.bfloat16, torch.float16):
                x, w = torch.randn(m, k).to(dtype), weight(n, k)
                report(f"gemv M{m}/{block_m} N{n} K{k} {dtype}", distance(gemv(x, *w, block_m), exact(x, *w)), linear.CONTRACT.tolerance[torch.float16])
    for size in (1e30, 1e-30):
        x, w = torch.randn(4, 528) * size, weight(13, 528)
        report(f"gemv float32 activations of {size}", distance(gemv(x, *w, 4), exact(x, *w)), 1e-3)
    x, w = torch.randn(2, 528) * torch.logspace(-25, 25, 528), weight(13, 528)
    report("gemv fifty decades in one row", distance(gemv(x, *w, 2), exact(x, *w)), 1e-3)
    c = dense_gemv.tile(Problem(1, 13, 1040, 80, torch.float16))
    x, w = torch.randn(1, 1040).half(), weight(13, 1040)
    report("gemv default tile", distance(gemv(x, *w, 1, config=c), exact(x, *w)), 1e-3)


def mid_cases():
    tiles = (MidConfig(16, 32, 64, 4, 2), MidConfig(32, 16, 32, 4, 2, group_n=2))
    for m, n, k in ((16, 64, 128), (5, 64, 128), (33, 40, 128), (17, 50, 80), (1, 16, 16), (70, 33, 176)):
        for dtype, bound in ((torch.float16, 1e-3), (torch.float32, 2e-6)):
            for c in tiles:
                x, w = torch.randn(m, k).to(dtype), weight(n, k)
                report(f"mid {(m, n, k)} {dtype} {c}", distance(mid(x, *w, c), exact(x, *w)), bound)
    for size in (1e30, 1e-30):
        x, w = torch.randn(17, 80) * size, weight(50, 80)
        report(f"mid float32 activations of {size}", distance(mid(x, *w, tiles[0]), exact(x, *w)), 2e-6)


def siblings_cases():
    """One call by the rows of several layers, each with a global scale of its own; 16 rows are the grain of their starts."""
    for sizes in ((13, 20), (16, 8, 24), (5, 16, 1)):
        rows = []
        for n in sizes:
            start = -(-(rows[-1] if rows else 0) // 16) * 16
            rows += [start, start + n]
        q, s, _ = weight(rows[-1], 528)
        g = torch.tensor([0.37, 0.011, 0.002])[: len(sizes)]
        bounds = tuple(rows[2::2])
        for m, kind in ((1, "gemv"), (3, "gemv"), (17, "mid")):
            x = torch.randn(m, 528).half()
            tile = GemvConfig(4 if m > 1 else 1, 8, 64, 4) if kind == "gemv" else MidConfig(32, 16, 32, 4, 2)
            y = launched(kind, x, (q, s, g), tile, bounds)
            want = linear_siblings.reference(x.double().float(), q, s, g, None, rows)
            got = [y[:, a:b] for a, b in linear_siblings.spans(rows)]
            report(f"siblings {kind} M{m} {sizes}", max(distance(a, b) for a, b in zip(got, want, strict=True)), 1e-3)


def glu_cases():
    for act in linear_glu.ACTIVATIONS:
        for m, n, k, dtype, scales, bias in (
            (1, 16, 1024, torch.bfloat16, 1, False),
            (3, 13, 528, torch.float16, 2, True),
            (1, 5, 16, torch.float16, 2, False),
            (2, 8, 592, torch.bfloat16, 1, True),
        ):
            q, s, g = weight(2 * n, k)
            # gates of ordinary size: where the activation saturates it proves nothing
            g = torch.tensor([0.002, 0.37])[:scales] if scales == 2 else g / 100
            x = torch.randn(m, k).to(dtype) / k**0.5
            b = torch.randn(2 * n).to(dtype) if bias else None
            with (
                mock.patch.object(host, "arch", return_value=80),
                mock.patch.object(forms, "ASM", False),
                mock.patch.object(torch, "empty", _float32_out),
            ):
                form, inputs = glu_gemv.form(act, bias, scales), (x, q, s, g if scales == 2 else g.reshape(()), *((b,) if bias else ()))
                y = run.by_triton(form, inputs, Problem(m, n, k, 80, dtype), GemvConfig(1, 4, 64, 4))
            want = linear_glu.reference(x.float(), q, s, g if scales == 2 else g.reshape(()), None if b is None else b.float(), act)
            report(f"glu {act} M{m} I{n} K{k} {dtype} scales {scales} bias {bias}", distance(y, want), 1e-3)


def fp8_head_cases():
    for m, n, k in ((1, 16, 512), (2, 13, 50), (1, 5, 1040)):
        for dtype in (torch.bfloat16, torch.float16):
            w, scale = linear_fp8.quantize_weight(torch.randn(n, k))
            w.view(torch.uint8)[:, :4] = torch.tensor([0x7E, 0xFE, 0x01, 0x81], dtype=torch.uint8)  # the extremes of E4M3
            x = torch.randn(m, k).to(dtype)
            with mock.patch.object(host, "arch", return_value=80), mock.patch.object(torch, "empty", _float32_out):
                y = run.by_form(fp8_gemv.FORM, x, (w, scale), tile=fp8_gemv.Fp8GemvConfig(4, 128, 4))
            report(f"fp8_gemv {(m, n, k)} {dtype}", distance(y, linear_fp8.reference(x.float(), w, scale)), 1e-3 if dtype == torch.float16 else 2e-6)


def rows_stay_apart():
    """NaN and Inf stay in their row; a zero row gives exact zeros; what lies behind the last row is not read."""
    w = weight(13, 80)
    for kind, launch in (("gemv", lambda x: gemv(x, *w, 4)), ("mid", lambda x: mid(x, *w, MidConfig(16, 16, 32, 4, 2)))):
        for bad in (float("nan"), float("inf")):
            memory = torch.randn(9, 80).half()
            memory[5:] = float("nan")  # behind the five rows of x
            x = memory[:5]
            clean = launch(x)
            x[2, 79] = bad
            x[3] = 0
            y = launch(x)
            others = torch.equal(y[[0, 1, 4]], clean[[0, 1, 4]]) and bool(clean.isfinite().all())
            zero = not y[3].any()
            # 0 * inf, and inf, are not finite for any weight
            report(f"{kind} {bad} stays in its row", float(not (others and zero and not y[2].isfinite().any())), 0.0)


def dequantized(parts, scale, g, out, ends=None):
    """The kernel, four codes a thread: what is not inline PTX of it. Programs are small: several matrices meet in one, and several programs in a matrix."""
    batched = out.dim() > 2
    constants = dict(BATCHED=batched, UNIT=4, FACTOR=dequantize_fp8.WEIGHT_FACTOR, BLOCK=32, STEPS=3)
    units, a_matrix = out.numel() // 4, out.shape[-2] * out.shape[-1] // 4 if batched else 1
    dequantize_rows[(-(-units // 96),)](
        parts[0], scale.view(torch.uint8), g, out, units, a_matrix, **constants, SMALL=a_matrix < 96, META=parts[1] if len(parts) > 1 else None, ENDS=ends
    )
    return out


def dequantize_cases():
    for shape in ((4, 64), (7, 48), (1, 16), (3, 5, 16), (2, 33, 80)):
        for dtype in (torch.float32, torch.float16):
            q, s, g = nvfp4.quantize(torch.randn(shape))
            out = dequantized((q,), s, g, torch.full(shape, float("nan"), dtype=dtype))
            report(f"dequantize {shape} {dtype}", float(not torch.equal(out, nvfp4.dequantize(q, s, g, dtype))), 0.0)
    q = torch.arange(256, dtype=torch.uint8).repeat(127, 1)[:, :256]
    s = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous().view(nvfp4.SCALE_DTYPE)
    g = torch.tensor(1.7)
    out = dequantized((q,), s, g, torch.empty(127, 512))
    want = nvfp4.dequantize(q, s, g, torch.float32)
    report("dequantize all bytes, all scales", float(not torch.equal(out.view(torch.int32), want.view(torch.int32))), 0.0)
    report("dequantize_fp8 all bytes, all scales", differing8(dequantized((q,), s, None, out), dequantize_fp8.reference(q, s)), 0.0)
    for shape, counts in (((5, 7, 48), (0, 3, 0, 0, 1)), ((4, 40, 80), (0, 0, 2, 0)), ((9, 1, 16), (1, 0, 0, 0, 0, 0, 0, 0, 0)), ((3, 40, 64), (0, 0, 0))):
        q, s, g = nvfp4.quantize(torch.randn(shape))
        out = dequantized((q,), s, g, torch.full(shape, float("nan")), torch.tensor(counts, dtype=torch.int32).cumsum(0).int())
        used, programs = torch.tensor(counts) > 0, -(-shape[0] * shape[1] * shape[2] // 4 // 96)
        whole = torch.equal(out[used], nvfp4.dequantize(q, s, g, torch.float32)[used])
        some = programs == 1 or bool(out.isnan().any())  # what no row needs is skipped
        report(f"dequantize {shape} of {counts} rows", float(not (whole and some)), 0.0)


def sparse_weight(n, k):
    """Every code, pattern, pair of patterns and scale occurs."""
    _, s, g = weight(n, k)
    nibble = torch.tensor(sparse24.NIBBLES, dtype=torch.uint8)[torch.randint(0, 6, (n, k // 4))]
    return torch.randint(0, 256, (n, k // 4), dtype=torch.uint8), sparse24.pack_meta(nibble), s, g


def sparse_launched(kind, x, w, tile):
    with (
        mock.patch.object(host, "arch", return_value=80),
        mock.patch.object(forms, "ASM", False),
        mock.patch.object(torch, "empty", _float32_out),
    ):
        return run.by_form({"gemv": sparse_gemv_kernel, "mid": sparse_mid_kernel}[kind].FORM, x, w, tile=tile)


def sparse_gemv(x, w, tile):
    return sparse_launched("gemv", x, w, tile)


def sparse_exact(x, w):
    return x.double() @ sparse24.dequantize_sparse24(*w, torch.float32).double().T


def sparse_cases():
    tile = sparse_gemv_kernel.GemvConfig(8, 32, 4)
    for m in (1, 3):
        for n, k in ((16, 1024), (13, 512), (8, 544), (5, 32), (11, 608)):  # aligned; N tail; K % 32 == 0 only; both
            for dtype in (torch.bfloat16, torch.float16):
                x, w = torch.randn(m, k).to(dtype), sparse_weight(n, k)
                report(f"sparse_gemv M{m} N{n} K{k} {dtype}", distance(sparse_gemv(x, w, tile), sparse_exact(x, w)), linear.CONTRACT.tolerance[torch.float16])
    for size in (1e30, 1e-30):
        x, w = torch.randn(2, 544) * size, sparse_weight(13, 544)
        report(f"sparse_gemv float32 activations of {size}", distance(sparse_gemv(x, w, tile), sparse_exact(x, w)), 1e-3)
    x, w = torch.randn(1, 544) * torch.logspace(-25, 25, 544), sparse_weight(13, 544)
    report("sparse_gemv fifty decades in one row", distance(sparse_gemv(x, w, tile), sparse_exact(x, w)), 1e-3)
    x, w = torch.randn(1, 1056).half(), sparse_weight(13, 1056)
    report("sparse_gemv default tile", distance(sparse_gemv(x, w, sparse_gemv_kernel.tile(Problem(1, 13, 1056, 80, torch.float16))), sparse_exact(x, w)), 1e-3)
    for i, pattern in enumerate(sparse24.NIBBLES):  # one pattern alone, activations that tell the positions apart
        values, meta, s, g = sparse_weight(5, 64)
        w = values, torch.full_like(meta, pattern * 17), s, g
        x = (0.25 ** (torch.arange(64) % 4))[None].half() / 64
        report(f"sparse_gemv pattern {i}", distance(sparse_gemv(x, w, tile), sparse_exact(x, w)), 1e-3)
    w, memory = sparse_weight(13, 96), torch.randn(9, 96).half()
    memory[5:] = float("nan")
    x = memory[:5]
    clean = sparse_gemv(x, w, tile)
    x[2] = float("nan")
    x[3] = 0
    y = sparse_gemv(x, w, tile)
    apart = torch.equal(y[[0, 1, 4]], clean[[0, 1, 4]]) and not y[3].any() and bool(y[2].isnan().all())
    report("sparse_gemv NaN stays in its row", float(not apart), 0.0)

    tiles = (MidConfig(16, 32, 64, 4, 2), MidConfig(32, 16, 32, 4, 2, group_n=2))
    for m, n, k in ((16, 64, 128), (33, 40, 128), (17, 50, 96), (1, 16, 32), (70, 33, 160)):
        for dtype, bound in ((torch.float16, 1e-3), (torch.float32, 2e-6)):
            x, w = torch.randn(m, k).to(dtype), sparse_weight(n, k)
            for c in tiles:
                report(f"sparse_mid {(m, n, k)} {dtype} {c}", distance(sparse_launched("mid", x, w, c), sparse_exact(x, w)), bound)
    memory = torch.randn(9, 96).half()
    memory[5:] = float("nan")
    x, w = memory[:5], sparse_weight(13, 96)
    clean = sparse_launched("mid", x, w, tiles[0])
    x[2] = float("nan")
    x[3] = 0
    y = sparse_launched("mid", x, w, tiles[0])
    apart = torch.equal(y[[0, 1, 4]], clean[[0, 1, 4]]) and not y[3].any() and bool(y[2].isnan().all())
    report("sparse_mid NaN stays in its row", float(not apart), 0.0)

    for shape in ((4, 64), (7, 96), (1, 32), (3, 5, 32)):
        for dtype in (torch.float32, torch.float16):
            parts = [sparse_weight(shape[-2], shape[-1]) for _ in range(shape[0] if len(shape) > 2 else 1)]
            v, m, s, g = (torch.stack(t) if len(shape) > 2 else t[0] for t in zip(*parts, strict=True))
            out = torch.full(shape, float("nan"), dtype=dtype)
            dequantized((v, m), s, g, out)
            report(f"sparse_dequantize {shape} {dtype}", float(not torch.equal(out, sparse24.dequantize_sparse24(v, m, s, g, dtype))), 0.0)
    values = torch.arange(256, dtype=torch.uint8).repeat(36, 1)
    meta = sparse24.pack_meta(torch.tensor(sparse24.NIBBLES, dtype=torch.uint8).repeat_interleave(6)[:, None].expand(36, 256).contiguous())
    out = torch.empty(36, 512, dtype=torch.uint8)
    decompress_rows[(36,)](values, meta, out.view(torch.int16), values.numel(), BLOCK=256)
    report("sparse_decompress all bytes, all patterns", float(not torch.equal(out, sparse24.decompress(values, meta))), 0.0)
    out, scale = torch.empty(36, 1024), torch.arange(64, dtype=torch.uint8).expand(36, 64).contiguous().view(nvfp4.SCALE_DTYPE)
    dequantized((values, meta), scale, None, out)
    want = dequantize_fp8.reference(sparse24.decompress(values, meta), scale)
    report("sparse_dequantize_fp8", differing8(out, want), 0.0)


def quantize_cases():
    for m, k in ((1, 16), (3, 48), (5, 272), (2, 600), (4, 1000), (2, 768), (3, 768)):
        for size in (1.0, 1e30, 1e-30):
            x = torch.randn(m, k) * size
            x[0, 0] = 0
            check_quantize(f"quantize_rows {(m, k)} {size}", x)
    x = torch.randn(4, 48)
    x[1] = 0
    check_quantize("quantize_rows zero row", x)
    check_quantize("quantize_rows subnormal row", torch.full((2, 48), 1e-40))
    for bad in (float("nan"), float("inf")):
        x = torch.randn(4, 48).half()
        x[2, 7] = bad
        out, scale = run_quantize(x)
        keep = [0, 1, 3]
        want, want_scale = quantize_rows_fp8.reference(x[keep])
        fine = not differing8(out[keep], want) and torch.equal(scale[keep], want_scale) and bool(out[2].isnan().any())
        report(f"quantize_rows {bad} stays in its row", float(not fine), 0.0)


def run_quantize(x):
    out = torch.empty(x.shape)
    scale = torch.empty(x.shape[0], 1)
    m, k = x.shape
    whole = m % 2 == 0  # with both forms of the kernel
    quantize_rows[(m,)](x, out, scale, k, quantize_rows_fp8.E4M3_MAX, LANE_ORDER=k % 256 == 0, BLOCK=1024 if whole else 64, WHOLE=whole, PDL=False)
    return out, scale


def quantize_glu_cases():
    for act in linear_glu.ACTIVATIONS:
        for (m, inner), blocks in itertools.product(((1, 16), (3, 48), (2, 230), (2, 256)), (0, 1, 4)):
            x = torch.randn(m, 2 * inner) * 2
            x[-1, 5], x[0, inner:] = 0, x[0, inner:] * 1e4
            out, scale = torch.empty(m, inner), torch.empty(m, 1)
            quantize_glu_rows[(m,)](
                x,
                out,
                scale,
                inner,
                quantize_rows_fp8.E4M3_MAX,
                ACT=activation_code(act),
                LANE_ORDER=inner == 256,
                BLOCK=256 if blocks == 1 else 64,
                BLOCKS=blocks,
                PDL=False,
            )
            want, want_scale = quantize_glu_rows_fp8.reference(x, act, inner == 256)
            case = f"quantize_glu_rows {(m, inner)} {act} {blocks}"
            report(case + " scale", float(((scale - want_scale) / want_scale).abs().max()), 1e-6)
            # Codes that differ lie at an edge between two: by one, and few of them.
            got = out.to(torch.float8_e4m3fn)
            report(case + " codes", distance(got.double() * scale, want.double() * want_scale), quantize_glu_rows_fp8.CONTRACT.tolerance[torch.float8_e4m3fn])
    x = torch.zeros(2, 192)
    x[1, 3] = float("nan")
    out, scale = torch.empty(2, 96), torch.empty(2, 1)
    quantize_glu_rows[(2,)](x, out, scale, 96, quantize_rows_fp8.E4M3_MAX, ACT=ActivationCode.SILU.value, LANE_ORDER=False, BLOCK=32, BLOCKS=3, PDL=False)
    report("quantize_glu_rows zero row, NaN stays in its row", float(not (scale[0] == 1 and not out[0].any() and out[1].isnan().any())), 0.0)


def topk_cases():
    for (t, e), k in (((3, 128), 8), ((2, 33), 5), ((4, 4), 4), ((2, 300), 32)):
        for name in ("normal", "equal", "odd"):
            x = torch.randn(t, e)
            if name == "equal":
                x = (x * 2).round() * 0.0 if e == 4 else (x * 2).round()
            if name == "odd":
                x[0, 1], x[0, 3], x[-1] = float("nan"), float("inf"), -float("inf")
            values, indices = torch.full((t, k), 7.0), torch.full((t, k), -1)
            topk_rows[(t,)](x, values, indices, e, K=k, **{n: v for n, v in topk_tile(e, k).items() if n != "num_warps"})
            want, order = topk.reference(x, k)
            report(f"topk {(t, e)} {name}", float(not (torch.equal(indices, order) and torch.equal(values.nan_to_num(1e9), want.nan_to_num(1e9)))), 0.0)


def router_cases():
    for (t, h, e), k, biased in (((3, 96, 8), 2, False), ((1, 700, 33), 5, True), ((8, 64, 60), 8, True)):
        x, weight = torch.randn(t, h).bfloat16(), torch.randn(e, h).bfloat16() / h**0.5
        bias = torch.randn(e).bfloat16() if biased else None
        scores = torch.empty(t, e)
        tile = {n: v for n, v in scores_tile(t, h).items() if n != "num_warps"}
        router_scores[(e,)](x, weight, bias, scores, t, h, HAS_BIAS=biased, PDL=False, **tile)
        want = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        report(f"router {(t, h, e)} scores", distance(scores, want), 1e-6)
        for number, form in enumerate(router.FORMS):
            if e == 60:
                scores[0, 1], scores[-1, 3] = float("inf"), float("nan")
            weights, ids = torch.full((t, k), 7.0), torch.full((t, k), -1)
            router_choice[(t,)](scores, weights, ids, e, K=k, FORM=number, PDL=False, **{n: v for n, v in topk_tile(e, k).items() if n != "num_warps"})
            best, order = router.chosen(scores, k, form, torch.float32)
            same = torch.equal(ids, order) and torch.equal(weights.isnan(), best.isnan())
            report(f"router {(t, h, e)} {form}", distance(weights.nan_to_num(0.0), best.nan_to_num(0.0)) if same else float("inf"), 1e-6)


def differing8(y, want) -> float:
    """How many of ``y`` do not round to the E4M3 bytes ``want``."""
    return float((y.to(torch.float8_e4m3fn).view(torch.uint8) != want.view(torch.uint8)).sum())


def check_quantize(case, x):
    out, scale = run_quantize(x)
    want, want_scale = quantize_rows_fp8.reference(x, x.shape[1] % 256 == 0)
    report(case + " scale", float(not torch.equal(scale, want_scale)), 0.0)
    report(case + " codes", differing8(out, want), 0.0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gemv_cases()
    mid_cases()
    siblings_cases()
    glu_cases()
    fp8_head_cases()
    rows_stay_apart()
    dequantize_cases()
    quantize_cases()
    quantize_glu_cases()
    topk_cases()
    router_cases()
    sparse_cases()
