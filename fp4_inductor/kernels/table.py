"""The dispatch rows: which kernel serves which call, on which architecture, up to which M, and why.

Data, not code. ``select.plan`` turns rows and a call into an ordered list of regimes; the lowerings and the
self-dispatching op both read that list, so a compiled graph and an eager call never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..ops.linear import PREFILL, WEIGHT_ONLY

REGIMES = (
    "gemv",
    "small",
    "mid",
    "wide",
    "wide_fp8",
    "large_nvfp4",
    "large_fp8",
    "large_dense",
    "cpu",
    "unfused",
    "decode",
    "table",
    "grouped",
    "by_expert",
    "attention",
    "library",
)
# Kernels of csrc/ whose library takes one global scale, of an expert one: another library of the same source, of this name besides, takes several, or two.
ONE_SCALE = ("sparse_linear_small", "sparse_linear_table", "sparse_linear_wide", "moe_decode_table", "moe_grouped_wide", "moe_grouped_wide_fp8")
SEVERAL_SCALES = "_scales"
BF16 = (torch.bfloat16,)
HALF = (torch.bfloat16, torch.float16)
ANY = (torch.bfloat16, torch.float16, torch.float32)
NVFP4 = ("nvfp4",)
FP8 = ("auto", "fp8")

# A row that is only emulated, or that lost where it was measured, never serves a call by itself: DispatchConfig(candidates=...) switches it on.
Status = Literal["measured on H200", "right on H200, not timed; elsewhere compiled", "compiled, not run", "runs in CI", "emulated, not timed", "measured, off"]
EMULATED: Status = "emulated, not timed"
LOST: Status = "measured, off"
MEASURED: Status = "measured on H200"
RIGHT: Status = "right on H200, not timed; elsewhere compiled"  # lowering_tests/gpu compares it with float64 there
COMPILED: Status = "compiled, not run"


def for_scales(name: str, count: int) -> str:
    """The kernel of ``csrc/`` that takes ``count`` global scales where ``name`` takes one."""
    return name + SEVERAL_SCALES if count > 1 and name in ONE_SCALE else name


@dataclass(frozen=True)
class Row:
    """One way to serve one op in one regime.

    Args:
        op: the ``torch.ops.fp4`` name; ``"sparse_moe"``: ``fp4.moe`` with 2:4-sparse experts (one of the two weights is enough).
        regime: one of :data:`REGIMES`; also the key of a threshold override in ``DispatchConfig``.
        kernel: launcher / template name.
        arch: inclusive range of compute capability times ten (0 for CPU).
        max_m: largest number of activation rows this row serves; None: no limit.
        dtypes: activation dtypes.
        reason: one sentence, at most 200 characters: the measurement or the hardware fact behind the row; more figures stand in ``benchmarks/NOTES.md``.
        status: what has been run.
        prefill: the values of ``prefill`` under which the row applies.
        k_multiple, n_multiple: divisibility the kernel needs.
        not_k_multiple: where K is a multiple of it another row is the better one; 0: nowhere.
        one_scale: serves a weight with one global scale only; other rows also several layers of one call, each with a global scale of its own.
        csrc: name of the kernel of ``csrc/`` behind it (``kernels/csrc.py``); empty: none.
        without: a regime; this row serves only calls that no row of that regime takes.
        min_m: fewer rows than that are left to the row without a limit, unless another row has them.
        max_weights, min_weights: of a larger, or smaller, weight, N * K, another row is the better one.
        n: the fewest and the most outputs; with others another row is the better one.
        triton: the oldest Triton that compiles it.
        plain: takes only calls whose ``form`` is empty: of ``fp4.moe`` ``select.moe_form``, of ``fp4.decode_attention`` ``select.attention_form``.
        m_per_expert: with E experts the row serves M = T * k up to this times E, if that is more than ``max_m``.
    """

    op: str
    regime: str
    kernel: str
    arch: tuple[int, int]
    max_m: int | None
    dtypes: tuple[torch.dtype, ...]
    reason: str
    status: Status
    prefill: tuple[str, ...] = PREFILL
    k_multiple: int = 16
    n_multiple: int = 1
    csrc: str = ""
    one_scale: bool = False
    without: str | None = None
    min_m: int = 1
    m_per_expert: float = 0.0
    triton: tuple[int, int] = (0, 0)
    max_weights: int | None = None
    min_weights: int = 0
    n: tuple[int, int] = (1, 2**31)
    not_k_multiple: int = 0
    plain: bool = False

    @property
    def off(self) -> bool:
        """Serves only where ``DispatchConfig(candidates=...)`` names its kernel."""
        return self.status in (EMULATED, LOST)

    @property
    def batch(self) -> str:
        """Why the last bits of a result may depend on how many rows the call has, within this regime; empty: they do not."""
        together, why = (
            BATCH.get((self.op, self.kernel))
            or BATCH.get(("", self.kernel))
            or (1, "not examined" if "moe" in self.op or "w4a4" in self.kernel + self.op else "")
        )
        return why if self.max_m is None or self.max_m > together else ""


# (op, or "" for all, kernel) -> (up to this M all calls sum a row in one order, what changes above).
_WARPS = (16, "K is split over other numbers of warps for M <= 16 than above, unless 8192 <= N <= 8448 or N < 8192 <= K")
_SEVEN = (16, "for more than 16 rows seven warps share K in place of eight where 6337 <= N <= 8448 and K >= 2048")
_SPLITS = (1, "the tile and the number of blocks that share K follow M")
_TILE = (1, "the tile follows M; a graph with dynamic M keeps one")
_LIBRARY = (1, "the library chooses its algorithm by M")
_EXPERTS = (1, "the tiles follow the number of tokens, and experts are summed in the order in which the tokens of a call name them")
BATCH: dict[tuple[str, str], tuple[int, str]] = {
    ("linear", "cpu"): (8, "up to 8 rows are summed in another order than more"),
    ("linear", "triton_gemv"): (1, "one row is summed in other pieces than 2 to 4"),
    ("sparse_linear", "cpu"): (8, "up to 8 rows are summed in another order than more"),
    ("linear_fp8", "cpu"): _LIBRARY,
    ("decode_attention", "triton_decode_attention"): (1, "the number of parts follows the numbers of sequences and KV heads, not M"),
    **{("", f"cuda_small{what}"): _WARPS for what in ("", "_any_k", "_glu", "_pointwise")},
    **{("", f"cuda_wide{finish}"): _SPLITS for finish in ("", "_glu", "_pointwise")},
    ("", "cuda_wide_fp8"): _SPLITS,
    **{("", f"cuda_table{what}"): _SEVEN for what in ("", "_glu", "_pointwise")},
    **{("", f"cuda_sparse_{size}"): _SPLITS for size in ("small", "wide", "wide_fp8")},
    ("", "cuda_sparse_table"): (16, ""),
    ("moe", "cuda_moe_wide"): (1, "the tile follows the number of pairs an expert"),
    ("moe", "cuda_moe_table"): _EXPERTS,
    ("sparse_moe", "cuda_sparse_moe_table"): _EXPERTS,
    **{(op, f"triton_{op}_decode"): (1, "one token, two, and more are summed in other pieces") for op in ("moe", "sparse_moe")},
    ("", "triton_mid"): _TILE,
    ("", "triton_sparse_mid"): _TILE,
    **{(op, kernel): _LIBRARY for op, kernel in (
        ("linear", "dequantize_fp8 + scaled_mm"), ("linear", "dequantize + mm"), ("linear_fp8", "scaled_mm"), ("linear_fp8", "cast + mm"),
        ("sparse_linear", "sparse_dequantize_fp8 + scaled_mm"), ("sparse_linear", "sparse_dequantize + mm"), ("decode_attention", "sdpa"),
    )},
}  # fmt: skip


_GEMV = "bound by memory: dot products on packed words take 1.1-1.3x the time of reading the weight at M = 1; epilogues fuse behind it"
_GEMV_90 = "dot products on packed words; an 8B model's step on an H100 takes 69 us a layer, with cuda_table begun early 75 (on an H200 65.7 and 64.6)"
_SMALL = "feeds packed weights straight into mma.sync: 17.4 us at N = K = 8192, M = 8 on an H200, bf16 cuBLAS 34; three siblings take the time of one layer"
_SMALL_90 = "feeds packed weights straight into mma.sync: 17.4 us at N = K = 8192, M = 8, bf16 cuBLAS 34; cuda_table (K % 256 = 0, M <= 24) and cuda_wide (from 2^24 weights on) are faster"
# Up to how many rows on sm_90, and where. linear_wide brings scales as tiles where K is a multiple of 256; without that it was not timed.
_SMALL_UNTIL: tuple[tuple[int, dict[str, Any]], ...] = (
    (32, {"max_weights": 2**24 - 1}),
    (32, {"n": (1, 8191), "not_k_multiple": 256}),
    (16, {"not_k_multiple": 256}),
)
# Up to how many rows linear_wide serves before linear_wide_fp8 does, which takes K % 256 == 0.
_WIDE_UNTIL: tuple[tuple[int, dict[str, Any]], ...] = (
    (128, {"max_weights": 2**25 - 1, "k_multiple": 64}),
    (128, {"not_k_multiple": 256, "k_multiple": 64}),
    (64, {"min_weights": 2**25, "max_weights": 2**26, "k_multiple": 256}),
    (32, {"min_weights": 2**26 + 1, "k_multiple": 256}),
)
_TABLE = "decodes by a table in shared memory: 14.4 us at N = K = 8192, M = 8, and 15.3 at M = 16, where cuda_small takes 17.3 and 24.7"
_UNTIL_256 = "serves to 256 rows where no FP8 product follows: 56 us at N = K = 8192, where a transient weight takes 46 before the product's 50"
_MID = "first version: decodes in registers for tensor cores; above M = 64 one pass that writes a transient FP8 weight costs less"
_GLU = "the GEMV's loop over rows of gate and of up, and their product: one launch, nothing stored in between"
_ANY_K = "cuda_small with narrower copies, for K that is only a multiple of 16: 20.2 us at N = 8192, K = 8208, M = 1, where the GEMV takes 26.6"
_THEN_SUMS, _PAIRED_SUMS = "act(x W + bias) * mul + residual on the float32 sums", "act(gate) * up on the float32 sums of both"
_THEN = _THEN_SUMS + ": Inductor cannot fuse a pointwise kernel behind an operator"
_PAIRED = _PAIRED_SUMS + ": half the stores, and no pointwise kernel behind it"
_THEN_90 = _THEN_SUMS + ": with a residual 17.3 us at N = K = 8192, M = 2, in two kernels 18.9; but 34.1 and 32.8 at M = 32"
_PAIRED_90 = _PAIRED_SUMS + ": 7.3 us at N = K = 4096, M = 2, where the matmul alone takes 6.7 and eager steps 12.4"
_PAIRED_WIDE = _PAIRED_SUMS + ": 24.4 us at N = K = 8192, M = 64, where the matmul alone takes 22.6"
_THEN_WIDE = _THEN_SUMS + ": with a residual 24.5 us at N = K = 8192, M = 64, in two kernels 24.9"
_CUDA_WIDE = (
    "decodes each weight once for all rows, in registers, as wgmma's operand: at N = K = 8192 18 us for M = 32, 22 for 64, 31 for 128, bf16 cuBLAS 35 to 38"
)
_FP8 = "FP8 tensor cores; the transient weight costs one pass, and rowwise scaled_mm writes bfloat16"
_WIDE_FP8 = "rounds weights to E4M3 in registers for FP8 wgmma, no transient weight: at N = K = 8192 33 us for M = 256, 404 for 4096, where the transient path takes 58 and 471"
_W4A4 = (
    "activations are rounded to NVFP4 per token; pays where bf16 products, not weight bytes, are the limit: by data sheet above M = 33 (RTX 5090) to 79 (B200)"
)
_W4A4_EMULATED = (
    "no FP4 tensor cores: activations are rounded as there, then both operands multiplied in high precision; the same numbers, slower than not rounding"
)
_BLOCK_SCALED = "FP4 tensor cores take codes and E4M3 scales as they lie in memory"
_SPARSE_GEMV = "reads kept codes and gathers their activations: 22% fewer bytes than dense weights"
_SPARSE_GEMV_90 = (
    "reads kept codes, 22% fewer bytes, and gathers activations: 5.4 us at N = K = 4096, where cuda_sparse_small takes 6.3, but 20.1 for 16.1 at N = K = 8192"
)
_SPARSE_GEMV_WEIGHTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (_SPARSE_GEMV_90, {"max_weights": 2**24 - 1}),
    (_SPARSE_GEMV_90, {"min_weights": 2**24, "max_weights": 2**26 - 1, "not_k_multiple": 256}),
)
_SPARSE_SMALL_90 = "kept codes straight into mma.sp, half the decoding, 22% fewer bytes: 16.1 us at N = K = 8192, M = 1 to 8, where the Triton kernel takes 57 to 60 and bf16 cuBLAS 35"
_SPARSE_SMALL_ELSEWHERE = (
    "kept codes straight into mma.sp, half the decoding, 22% fewer bytes: a third of the Triton kernel's time on an H200; neither has run here"
)
_SPARSE_TABLE = (
    "cuda_table's decoding on kept codes, for mma.sp: 9.7 us at N = K = 8192, M = 1 begun early, where cuda_table takes 12.1; 11.7 for 13.8 where neither may"
)
_SPARSE_WIDE = "kept codes decoded in registers for sparse wgmma: half the decoding and products of cuda_wide; at N = K = 8192 19.2 us for M = 64, dense 21.6, and 39.9 for M = 256, with a transient weight 63"
_SPARSE_MID = "the dense mid kernel on codes decompressed in registers: 1.3-1.5x its instructions, 22% fewer bytes"
_SPARSE_MID_90 = "the dense mid kernel on codes decompressed in registers, 1.3-1.5x its instructions, 22% fewer bytes: 101 us at N = K = 8192, M = 64, dense weights 70, bf16 cuBLAS 38"
_SPARSE_WIDE_FP8 = "kept codes rounded to E4M3 in registers for sparse FP8 wgmma, no transient weight: products alone at N = K = 8192 31 us for M = 256, 358 for 4096, dense weights 35 and 476"
# Up to how many rows sparse_linear_wide serves before sparse_linear_wide_fp8 does.
_SPARSE_WIDE_UNTIL: tuple[tuple[int, tuple[torch.dtype, ...], tuple[str, ...], dict[str, Any]], ...] = (
    (256, BF16, FP8, {"max_weights": 2**25 - 1}),
    (64, BF16, FP8, {"min_weights": 2**25, "max_weights": 2**26}),
    (32, BF16, FP8, {"min_weights": 2**26 + 1}),
    (384, BF16, tuple(large for large in PREFILL if large not in FP8), {}),
    (384, (torch.float16,), PREFILL, {}),
)
_SPARSE_FP8 = "as the dense FP8 path, the transient weight written from 3.5 bits instead of 4.5"
_SPARSE_FP8_90 = "as the dense FP8 path, the transient weight written from 3.5 bits instead of 4.5, in 0.83 to 0.93 of its time: 524 us at N = K = 8192, M = 4096, bf16 cuBLAS 753"
_DECODE = "two launches, nothing sorted: 11 us for one token of Qwen3-30B; sorting pays from about 4 pairs an expert on (Mixtral: 396 us at 2, sorted 732; at 4 both 790)"
_DECODE_90 = (
    "two launches, nothing sorted: 11 us for one token of Qwen3-30B; ahead of sorting up to 0.6 pairs an expert: 46 us for 8 tokens of it, cuda_moe_wide 53"
)
_MOE_TABLE = "reads and decodes an expert once for eight tokens, by cuda_table's steps; pays from 8 million weights, H * N, on: Mixtral, 4 tokens, 139 us, Triton 195; Qwen3-30B, 4 tokens, 32 for 27"
_SPARSE_MOE_TABLE = "reads and decodes an expert once for eight tokens, by cuda_sparse_table's steps: Mixtral, both products 2:4, 1 and 4 tokens, 52 and 124 us, 0.92 and 0.90 of the dense layer's"
_MOE_WIDE = "pairs sorted by expert, each weight decoded in registers once for up to 128 of them: Qwen3-30B, 32 and 1024 tokens, 94 and 223 us, 161 and 481 without; FP8 products serve more pairs an expert"
# Up to how many pairs an expert it serves.
_MOE_WIDE_UNTIL: tuple[tuple[int, tuple[str, ...], dict[str, Any]], ...] = (
    (192, tuple(prefill for prefill in PREFILL if prefill not in FP8), {"k_multiple": 64}),
    (14, FP8, {"k_multiple": 256}),
    (24, FP8, {"k_multiple": 64, "not_k_multiple": 256}),
)
_MOE_WIDE_FP8 = "weights rounded to E4M3 in registers, never written: Qwen3-30B, 1024 and 4096 tokens, 191 and 520 us, bfloat16 products 266 and 817; 20 times the error, as of dense FP8 products"
_GROUPED = "pairs sorted by expert, weights decoded in registers: each is read once however many tokens share it"
_GROUPED_FP8 = "above 32 tokens an expert a pass that writes transient FP8 weights (at most 1 GiB at once) pays: 2.6 million of them a microsecond, FP8 products at 0.6 to 1.1 PFLOPS"
_SPARSE_DECODE = "the dense layer's two launches on kept codes and gathered activations: 22% fewer bytes, as many instructions"
_SPARSE_DECODE_90 = "the dense layer's two launches on kept codes: 22% fewer bytes, as many instructions; Qwen3-30B, 1 and 4 tokens, 11.5 and 29.8 us, dense experts 10.8 and 27"
_SPARSE_GROUPED = "the dense kernel on codes decompressed in registers: nothing dense in memory"
_ATTENTION = "reads the cache once, by KV head, where it lies and only what the mask leaves in; repeat_kv would copy it once for each query head"
_ATTENTION_90 = "reads the cache once, by KV head, where it lies and only what the mask leaves in: 5.9 us for one sequence of 520 positions (32 query heads, 8 KV heads of 128), sdpa 27"
_ATTENTION_LIBRARY = "many queries are limited by products, not by reading the cache: F.scaled_dot_product_attention"
_GROUPED_DENSE = "as the FP8 path, in bfloat16: at most 1 GiB of transient weights at once"


def _with_epilogue(op: str, finish: str, reason: str, measured: str, wide: str, max_m: int) -> tuple[Row, ...]:
    """The CUDA kernels of fp4.linear with more behind their sums. M = 1 stays with the GEMV where fp4.linear's rows leave it there.

    ``measured``, ``wide``: the reasons on sm_90, where the small kernel serves up to ``max_m``. Its gain of a microsecond or two says nothing of other GPUs.
    """
    small = (((80, 89), 16, reason, EMULATED), ((100, 129), 16, reason, EMULATED))
    hopper: tuple[tuple[int, dict[str, Any]], ...] = ((max_m, {"max_weights": 2**24 - 1}), (max_m, {"not_k_multiple": 256}))  # as without an epilogue
    common: dict[str, Any] = {"k_multiple": 64, "csrc": f"linear_small_{finish}", "min_m": 2}
    return (
        Row(
            op,
            "small",
            f"cuda_table_{finish}",
            (90, 90),
            16,
            HALF,
            f"{reason}; timed in a whole model only (cuda_table alone: 14.4 us at N = K = 8192, M = 8)",
            MEASURED,
            k_multiple=256,
            csrc=f"linear_table_{finish}",
            min_m=2,
        ),
        *(Row(op, "small", f"cuda_small_{finish}", (90, 90), m, HALF, measured, MEASURED, **common, **when) for m, when in hopper),
        *(Row(op, "small", f"cuda_small_{finish}", a, m, HALF, why, s, **common) for a, m, why, s in small),
        *(
            Row(op, "wide", f"cuda_wide_{finish}", (90, 90), m, dtypes, wide, MEASURED, prefill, csrc=f"linear_wide_{finish}", min_m=2, **when)
            for m, dtypes, prefill, when in (
                (128, (torch.float16,), WEIGHT_ONLY, {"k_multiple": 64}),
                (128, BF16, ("bf16",), {"k_multiple": 64}),
                *((m, BF16, FP8, when) for m, when in _WIDE_UNTIL),
                (64, HALF, NVFP4, {"k_multiple": 64}),
            )
        ),
    )


ROWS: tuple[Row, ...] = (
    Row(
        "linear",
        "cpu",
        "cpu",
        (0, 0),
        None,
        ANY,
        "C kernel: GEMV for M <= 8, else decode a cached block and multiply; dispatches itself",
        "runs in CI",
        WEIGHT_ONLY,
    ),
    Row("linear", "gemv", "triton_gemv", (90, 90), 1, HALF, _GEMV_90, MEASURED, k_multiple=64),
    Row("linear", "gemv", "triton_gemv", (80, 89), 1, HALF, _GEMV, "compiled, not run"),
    Row("linear", "gemv", "triton_gemv", (100, 129), 1, HALF, _GEMV, "compiled, not run"),
    Row(
        "linear",
        "gemv",
        "triton_gemv",
        (90, 90),
        4,
        HALF,
        "where no CUDA kernel takes the call: still faster than padding the rows to a tensor-core tile",
        "measured on H200",
        without="small",
    ),
    Row("linear", "gemv", "triton_gemv", (80, 89), 2, HALF, "where no CUDA kernel takes the call", "compiled, not run", without="small"),
    Row("linear", "gemv", "triton_gemv", (100, 129), 4, HALF, "where no CUDA kernel takes the call", "compiled, not run", without="small"),
    Row("linear", "small", "cuda_table", (90, 90), 24, HALF, _TABLE, MEASURED, k_multiple=256, csrc="linear_table"),
    *(Row("linear", "small", "cuda_small", (90, 90), m, HALF, _SMALL_90, MEASURED, k_multiple=64, csrc="linear_small", **when) for m, when in _SMALL_UNTIL),
    Row("linear", "small", "cuda_small", (80, 89), 16, HALF, _SMALL, "compiled, not run", k_multiple=64, csrc="linear_small"),
    Row("linear", "small", "cuda_small", (100, 129), 16, HALF, _SMALL, "compiled, not run", k_multiple=64, csrc="linear_small"),
    *(Row("linear", "wide", "cuda_wide", (90, 90), m, BF16, _CUDA_WIDE, MEASURED, FP8, csrc="linear_wide", **when) for m, when in _WIDE_UNTIL),
    Row("linear", "wide", "cuda_wide", (90, 90), 64, HALF, _CUDA_WIDE, MEASURED, NVFP4, 64, csrc="linear_wide"),
    Row("linear", "wide", "cuda_wide", (90, 90), 256, BF16, _UNTIL_256, MEASURED, ("bf16",), 64, csrc="linear_wide"),
    Row("linear", "wide", "cuda_wide", (90, 90), 256, (torch.float16,), _UNTIL_256, MEASURED, WEIGHT_ONLY, 64, csrc="linear_wide"),
    Row("linear", "small", "cuda_small_any_k", (90, 90), 32, HALF, _ANY_K, MEASURED, csrc="linear_small", not_k_multiple=64),
    Row("linear", "mid", "triton_mid", (90, 90), 64, HALF, _MID, MEASURED, without="wide"),
    Row("linear", "mid", "triton_mid", (80, 88), 256, HALF, "as on sm_90, but there are no FP8 tensor cores to hand over to", "compiled, not run"),
    Row("linear", "mid", "triton_mid", (89, 89), 64, HALF, _MID, "compiled, not run"),
    Row("linear", "mid", "triton_mid", (100, 129), 64, HALF, _MID, "compiled, not run"),
    Row("linear", "cpu", "cpu", (0, 0), 64, ANY, "few rows keep their activations as they are: the kernel of weight-only calls", "runs in CI", NVFP4),
    Row(
        "linear",
        "large_dense",
        "dequantize + mm",
        (80, 129),
        64,
        (torch.float32,),
        "few rows of float32 keep their activations as they are",
        "measured on H200",
        NVFP4,
    ),
    Row("linear", "large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4", (0, 0), None, ANY, _W4A4_EMULATED, "runs in CI", NVFP4),
    Row("linear", "large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4", (80, 99), None, ANY, _W4A4_EMULATED, RIGHT, NVFP4),
    Row("linear", "large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4", (100, 129), None, ANY, _W4A4, "compiled, not run", NVFP4),
    Row("linear", "wide_fp8", "cuda_wide_fp8", (90, 90), 8192, BF16, _WIDE_FP8, MEASURED, FP8, 256, 16, csrc="linear_wide_fp8"),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (90, 90), None, BF16, _FP8, "measured on H200", FP8, 16, 16),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (89, 89), None, BF16, _FP8, "compiled, not run", FP8, 16, 16),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (100, 129), None, BF16, _FP8, "compiled, not run", FP8, 16, 16),
    Row(
        "linear",
        "large_dense",
        "dequantize + mm",
        (80, 129),
        None,
        ANY,
        "writes a transient weight in the activation's dtype, then calls the library's GEMM",
        "measured on H200",
    ),
    Row(
        "linear_w4a4",
        "cpu",
        "cpu",
        (0, 0),
        None,
        ANY,
        "activations in float32 and the C kernel of fp4.linear: nothing is gained, it serves to judge quality",
        "runs in CI",
    ),
    Row(
        "linear_w4a4",
        "large_nvfp4",
        "cuda_w4a4",
        (120, 121),
        None,
        HALF,
        "mma.sync: " + _BLOCK_SCALED,
        EMULATED,
        k_multiple=64,
        csrc="linear_w4a4",
        one_scale=True,
    ),
    Row("linear_w4a4", "large_nvfp4", "triton_w4a4", (100, 120), None, HALF, _BLOCK_SCALED, "compiled, not run"),
    Row("linear_w4a4", "large_nvfp4", "triton_w4a4", (121, 129), None, HALF, _BLOCK_SCALED, "compiled, not run", triton=(3, 8)),
    Row("linear_w4a4", "large_dense", "dequantize both + mm", (80, 129), None, ANY, _W4A4_EMULATED, RIGHT),
    Row("linear_glu", "gemv", "triton_gemv_glu", (80, 129), 1, HALF, _GLU, EMULATED),
    *_with_epilogue("linear_glu", "glu", _PAIRED, _PAIRED_90, _PAIRED_WIDE, 32),
    Row(
        "linear_glu",
        "unfused",
        "linear, then act * up",
        (0, 129),
        None,
        ANY,
        "fp4.linear by its own rows, the product as a pointwise kernel behind it",
        "runs in CI",
    ),
    *_with_epilogue("linear_epilogue", "pointwise", _THEN, _THEN_90, _THEN_WIDE, 16),
    Row("linear_epilogue", "unfused", "linear, then pointwise", (0, 129), None, ANY, "fp4.linear by its own rows; Inductor fuses the rest", "runs in CI"),
    Row("linear_fp8", "cpu", "cpu", (0, 0), None, ANY, "float32 products of cached blocks: saves memory, not time", "runs in CI", k_multiple=1),
    Row("linear_fp8", "gemv", "triton_gemv_fp8", (80, 129), 1, HALF, "bandwidth-bound: half the bytes of bf16", RIGHT, k_multiple=1),
    Row("linear_fp8", "large_fp8", "scaled_mm", (89, 129), None, BF16, "FP8 tensor cores; activations are rounded per row", RIGHT, FP8, 16, 16),
    Row("linear_fp8", "large_dense", "cast + mm", (80, 129), None, ANY, "writes a transient weight in the activation's dtype", RIGHT, k_multiple=1),
    Row("sparse_linear", "cpu", "cpu", (0, 0), None, ANY, "C kernel: GEMV on the kept weights for M <= 8, else as dense", "runs in CI"),
    *(Row("sparse_linear", "gemv", "triton_sparse_gemv", (90, 90), 1, HALF, why, MEASURED, **when) for why, when in _SPARSE_GEMV_WEIGHTS),
    Row("sparse_linear", "gemv", "triton_sparse_gemv", (90, 90), 1, HALF, _SPARSE_GEMV_90, "measured on H200", without="small"),
    Row("sparse_linear", "gemv", "triton_sparse_gemv", (80, 89), 1, HALF, _SPARSE_GEMV, "compiled, not run"),
    Row("sparse_linear", "gemv", "triton_sparse_gemv", (100, 129), 1, HALF, _SPARSE_GEMV, "compiled, not run"),
    Row("sparse_linear", "small", "cuda_sparse_table", (90, 90), 16, HALF, _SPARSE_TABLE, MEASURED, k_multiple=256, csrc="sparse_linear_table", n=(16, 2**31)),
    *(
        Row("sparse_linear", "small", "cuda_sparse_small", arch, m, HALF, why, status, k_multiple=32, csrc="sparse_linear_small", without=without)
        for arch, m, why, status, without in (
            ((90, 90), 16, _SPARSE_SMALL_90, MEASURED, None),
            ((90, 90), 32, _SPARSE_SMALL_90, MEASURED, "wide"),
            ((80, 89), 16, _SPARSE_SMALL_ELSEWHERE, COMPILED, None),
            ((100, 129), 16, _SPARSE_SMALL_ELSEWHERE, COMPILED, None),
        )
    ),
    *(
        Row("sparse_linear", "wide", "cuda_sparse_wide", (90, 90), m, dtypes, _SPARSE_WIDE, MEASURED, large, 256, csrc="sparse_linear_wide", **when)
        for m, dtypes, large, when in _SPARSE_WIDE_UNTIL
    ),
    Row("sparse_linear", "mid", "triton_sparse_mid", (90, 90), 64, HALF, _SPARSE_MID_90, "measured on H200", without="wide"),
    Row("sparse_linear", "mid", "triton_sparse_mid", (80, 89), 64, HALF, _SPARSE_MID, "compiled, not run"),
    Row("sparse_linear", "mid", "triton_sparse_mid", (100, 129), 64, HALF, _SPARSE_MID, "compiled, not run"),
    Row("sparse_linear", "wide_fp8", "cuda_sparse_wide_fp8", (90, 90), 8192, BF16, _SPARSE_WIDE_FP8, MEASURED, FP8, 256, csrc="sparse_linear_wide_fp8"),
    *(
        Row("sparse_linear", "large_fp8", "sparse_dequantize_fp8 + scaled_mm", arch, None, BF16, why, status, FP8, 32, 16)
        for arch, why, status in (
            ((90, 90), _SPARSE_FP8_90, MEASURED),
            ((89, 89), _SPARSE_FP8, COMPILED),
            ((100, 129), _SPARSE_FP8, COMPILED),
        )
    ),
    Row("sparse_linear", "large_dense", "sparse_dequantize + mm", (80, 129), None, ANY, "as dense: a transient weight, then the library's GEMM", RIGHT),
    Row("moe", "cpu", "cpu", (0, 0), None, ANY, "expert by expert, only those with tokens, through the C kernels of fp4.linear", "runs in CI"),
    *(
        Row("moe", "decode", "triton_moe_decode", arch, 4, HALF, _DECODE, status, m_per_expert=3.0, without=without)
        for arch, status, without in (((90, 90), MEASURED, "wide"), ((80, 89), COMPILED, None), ((100, 129), COMPILED, None))
    ),
    Row("moe", "decode", "triton_moe_decode", (90, 90), 4, HALF, _DECODE_90, MEASURED, m_per_expert=0.6, without="table"),
    Row("moe", "decode", "triton_moe_decode", (90, 90), 8, HALF, _DECODE_90, MEASURED, min_weights=8 * 10**6, max_weights=2**24 - 1),
    *(
        Row(
            op,
            "table",
            kernel,
            (90, 90),
            16,
            BF16,
            reason,
            MEASURED,
            k_multiple=multiple,
            n_multiple=8,
            n=(32, 2**31),
            min_weights=least,
            csrc="moe_decode_table",
            m_per_expert=most,
            plain=True,
        )
        for op, kernel, multiple, least, most, reason in (
            ("moe", "cuda_moe_table", 64, 8 * 10**6, 1.0, _MOE_TABLE),
            ("sparse_moe", "cuda_sparse_moe_table", 256, 2**24, 3.0, _SPARSE_MOE_TABLE),
        )
    ),
    *(
        Row(
            "moe",
            "wide",
            "cuda_moe_wide",
            (90, 90),
            until,
            BF16,
            _MOE_WIDE,
            MEASURED,
            prefill,
            n_multiple=8,
            csrc="moe_grouped_wide",
            m_per_expert=float(until),
            plain=True,
            **when,
        )
        for until, prefill, when in _MOE_WIDE_UNTIL
    ),
    Row(
        "moe",
        "wide_fp8",
        "cuda_moe_wide_fp8",
        (90, 90),
        2**20,
        BF16,
        _MOE_WIDE_FP8,
        MEASURED,
        FP8,
        k_multiple=64,
        n_multiple=8,
        csrc="moe_grouped_wide_fp8",
        plain=True,
    ),
    Row("moe", "grouped", "triton_moe_grouped", (90, 90), 64, HALF, _GROUPED, MEASURED, m_per_expert=32.0, without="wide"),
    *(Row("moe", "grouped", "triton_moe_grouped", arch, 64, HALF, _GROUPED, COMPILED, m_per_expert=32.0) for arch in ((80, 89), (100, 129))),
    Row("moe", "large_fp8", "dequantize_fp8 + triton_grouped_fp8", (90, 90), None, BF16, _GROUPED_FP8, "measured on H200", FP8),
    Row("moe", "large_dense", "dequantize + grouped_mm", (80, 129), None, BF16, _GROUPED_DENSE, RIGHT, k_multiple=16, n_multiple=16),
    Row(
        "moe",
        "grouped",
        "triton_moe_grouped",
        (80, 129),
        None,
        (torch.float16,),
        "float16 stays in this kernel: torch._grouped_mm takes bfloat16 only",
        RIGHT,
    ),
    Row(
        "moe",
        "by_expert",
        "by expert",
        (80, 129),
        None,
        ANY,
        "no tensor cores serve this dtype or shape; reads the ids back, so there is no CUDA graph",
        RIGHT,
    ),
    Row("sparse_moe", "cpu", "cpu", (0, 0), None, ANY, "expert by expert, only those with tokens, through the C kernels of fp4.sparse_linear", "runs in CI"),
    *(
        Row("sparse_moe", "decode", "triton_sparse_moe_decode", arch, 4, HALF, why, status, m_per_expert=3.0, without="table")
        for arch, why, status in (((90, 90), _SPARSE_DECODE_90, MEASURED), ((80, 89), _SPARSE_DECODE, COMPILED), ((100, 129), _SPARSE_DECODE, COMPILED))
    ),
    Row("sparse_moe", "grouped", "triton_sparse_moe_grouped", (80, 129), 64, HALF, _SPARSE_GROUPED, RIGHT, m_per_expert=32.0),
    Row("sparse_moe", "large_fp8", "sparse_dequantize_fp8 + triton_grouped_fp8", (90, 90), None, BF16, _GROUPED_FP8, "measured on H200", FP8),
    Row("sparse_moe", "large_dense", "sparse_dequantize + grouped_mm", (80, 129), None, BF16, _GROUPED_DENSE, RIGHT, n_multiple=16),
    Row(
        "sparse_moe",
        "grouped",
        "triton_sparse_moe_grouped",
        (80, 129),
        None,
        (torch.float16,),
        "as dense: float16 stays in this kernel, torch._grouped_mm takes bfloat16 only",
        RIGHT,
    ),
    Row("sparse_moe", "by_expert", "by expert", (80, 129), None, ANY, "as dense: float32 and odd shapes; reads the ids back, so there is no CUDA graph", RIGHT),
    # M: queries times the heads that share a KV head; N: heads; K: width of a head.
    *(
        Row("decode_attention", "attention", "triton_decode_attention", arch, 16, HALF, why, status, k_multiple=8, plain=True)
        for arch, why, status in (((90, 90), _ATTENTION_90, MEASURED), ((80, 89), _ATTENTION, COMPILED), ((100, 129), _ATTENTION, COMPILED))
    ),
    Row("decode_attention", "library", "sdpa", (0, 129), None, ANY, _ATTENTION_LIBRARY, "runs in CI", k_multiple=1),
)
