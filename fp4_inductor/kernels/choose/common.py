"""What GPUs of several families do the same way: many rows, and ops with one kernel for a few rows."""

from __future__ import annotations

import torch

from ..asked import EMPTY, NOT_PLAIN, cache_in

FEW_QUERIES = 16  # of one KV head
DENSE, ROUNDED = "dequantize + mm", "quantize_rows_nvfp4 + linear_w4a4"


def first(can, *names):
    """The first of ``names`` that can serve the call, for every M."""
    found = next((name for name in names if can.ever(name)), None)
    if found is not None:
        yield None, found


def many_rows(call, can):
    """fp4.linear behind its kernels for few rows. Activations are rounded to NVFP4 only where prefill="nvfp4" asks for it."""
    if can.ever(ROUNDED):
        if call.dtype == torch.float32 and can(DENSE):
            yield 64, DENSE  # few rows of float32 keep their activations as they are
        yield None, ROUNDED
    yield from first(can, "dequantize_fp8 + scaled_mm", DENSE)


def linear_w4a4(call, can):
    yield from first(can, "cuda_w4a4", "triton_w4a4", "dequantize both + mm")


def linear_fp8(call, can):
    if can("triton_gemv_fp8"):
        yield 1, "triton_gemv_fp8"  # bound by memory: half the bytes of bf16
    yield from first(can, "scaled_mm", "cast + mm")


def many_assignments(call, can, sparse=False):
    """fp4.moe above some tokens an expert: a pass that writes temporary dense weights pays."""
    s = "sparse_" if sparse else ""
    # torch._grouped_mm takes bfloat16 only: float16 stays in the grouped kernel.
    grouped = (f"triton_{s}moe_grouped",) if call.dtype == torch.float16 else ()
    yield from first(can, f"{s}dequantize_fp8 + triton_grouped_fp8", f"{s}dequantize + grouped_mm", *grouped, "by expert")


def assignments(call, least, per_expert):
    """The M of a call with ``per_expert`` assignments of tokens to each expert; at least ``least``."""
    return max(least, int(per_expert * call.experts))


def linear_chain(call, can):
    if can("cuda_gemv_chain"):
        yield 1, "cuda_gemv_chain"
    yield from first(can, "one by one")


def linear_residual_squares(call, can):
    yield from by_table(can, "cuda_table_squares", "linear, sum, squares")


def rms_scaled_linear(call, can):
    yield from by_table(can, "cuda_table_rms", "scaled, then linear")


def rms_scaled_linear_glu(call, can):
    yield from by_table(can, "cuda_table_glu_rms", "scaled, then glu")


def by_table(can, name, apart):
    """``name``, which has half of an RMSNorm, where cuda_table serves the product: one row's norm is computed by cuda_gemv."""
    if can(name):
        yield 1, apart
        yield 32, name
    yield from first(can, apart)


def decode_attention(call, can):
    for name in ("triton_decode_attention", "triton_codes_attention"):
        if can(name):
            yield FEW_QUERIES, name  # the cache is read once, by KV head
    yield from first(can, "triton_masked_attention", "sdpa")


# Kernels that do all of a decode step of fp4.cached_attention, its prologue too: over a cache in the dtype of the query, and over one in 8 or 4 bits.
ONE_LAUNCH = ("cuda_step_attention", "cuda_step_attention_codes", "triton_cached_attention", "cuda_quantized_attention", "triton_quantized_attention")


def paged_attention(call, can):
    one_launch = ("cuda_paged_attention", "cuda_paged_attention_fp8")
    yield None, next((name for name in one_launch if can(name)), "gather + attention")


def router(call, can):
    if can("cuda_router"):
        # H200, 128 experts: 1 token 5.0 us (4.3 in two launches), 8 5.1 (5.9), 16 to 64 5.1 (8.4), 128 9.5 (8.6).
        yield 7, "scores + choice"
        yield 64, "cuda_router"
    yield None, "scores + choice"


PREFILL = "triton_prefill_attention"


def cached_attention(call, can):
    step = next((name for name in ONE_LAUNCH if can(name)), None)
    if step is not None:
        yield FEW_QUERIES, step  # a decode step: one launch in the place of five and more
    if can(PREFILL) and not by_library(call):
        if step is None:
            yield FEW_QUERIES, "append + attention"
        yield None, PREFILL  # without a mask in memory, and without what it excludes
    yield from first(can, "append + attention")


def by_library(call):
    """A prompt in an empty cache, plainly causal, without exact tokens: torch's attention is ahead on Hopper, where it has kernels of the vendor."""
    return EMPTY in call.form and NOT_PLAIN not in call.form and cache_in("nvfp4") not in call.form
