"""The dispatch rows: which kernel serves which call, on which architecture, up to which M, and why.

Data, not code. ``select.plan`` turns rows and a call into an ordered list of regimes; the lowerings and the
self-dispatching op both read that list, so a compiled graph and an eager call never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..ops.linear import LARGE_M, WEIGHT_ONLY

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
BF16 = (torch.bfloat16,)
HALF = (torch.bfloat16, torch.float16)
ANY = (torch.bfloat16, torch.float16, torch.float32)
NVFP4 = ("nvfp4",)
FP8 = ("auto", "fp8")

# A row that is only emulated, or that lost where it was measured, never serves a call by itself: DispatchConfig(candidates=...) switches it on.
Status = Literal["measured on H200", "compiled, not run", "runs in CI", "emulated, not timed", "measured, off"]
EMULATED: Status = "emulated, not timed"
LOST: Status = "measured, off"
MEASURED: Status = "measured on H200"
COMPILED: Status = "compiled, not run"


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
        reason: the measurement or the hardware fact behind the row.
        status: what has been run.
        large_m: the values of ``large_m`` under which the row applies.
        k_multiple, n_multiple: divisibility the kernel needs.
        not_k_multiple: where K is a multiple of it another row is the better one; 0: nowhere.
        siblings: serves several layers of one call, each with a global scale of its own; else they are called one by one.
        csrc: name of the kernel of ``csrc/`` behind it (``kernels/csrc.py``); empty: none.
        without: a regime; this row serves only calls that no row of that regime takes.
        min_m: fewer rows than that are left to the row without a limit, unless another row has them.
        max_weights, min_weights: of a larger, or smaller, weight, N * K, another row is the better one.
        n: the fewest and the most outputs; with others another row is the better one.
        triton: the oldest Triton that compiles it.
        plain: takes only calls whose ``form`` is empty: of ``fp4.moe`` ``select.moe_form``, of ``fp4.decode_attention`` ``select.attention_form``.
        early: only calls whose kernel is proven to be able to begin while the one before it runs (True), only others (False), or both (None).
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
    large_m: tuple[str, ...] = LARGE_M
    k_multiple: int = 16
    n_multiple: int = 1
    csrc: str = ""
    siblings: bool = False
    without: str | None = None
    min_m: int = 1
    m_per_expert: float = 0.0
    triton: tuple[int, int] = (0, 0)
    max_weights: int | None = None
    min_weights: int = 0
    n: tuple[int, int] = (1, 2**31)
    not_k_multiple: int = 0
    plain: bool = False
    early: bool | None = None

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
    ("", "cuda_small"): _WARPS,
    ("", "cuda_small_any_k"): _WARPS,
    ("", "cuda_small_glu"): _WARPS,
    ("", "cuda_small_pointwise"): _WARPS,
    **{("", f"cuda_wide{finish}"): _SPLITS for finish in ("", "_glu", "_pointwise")},
    ("", "cuda_wide_fp8"): _SPLITS,
    **{("", f"cuda_table{what}"): (16, "") for what in ("", "_glu", "_pointwise")},
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


_GEMV = "bandwidth-bound SIMT dot on packed words, 1.1-1.3x the read floor at M = 1; epilogues fuse behind it"
_GEMV_LARGE = (
    _GEMV + ". Of 2^25 weights and more cuda_table is ahead where it may begin early: 12.5 us at N = K = 8192, the GEMV 14.1; 36.9 and 41 at N = 28672"
)
# Which weights it serves on sm_90 though cuda_table serves more rows.
_GEMV_WEIGHTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (_GEMV, {"max_weights": 2**25 - 1}),
    (_GEMV, {"min_weights": 2**25, "not_k_multiple": 256}),
    (_GEMV_LARGE, {"min_weights": 2**25, "early": False}),
)
_SMALL = (
    "packed weights straight into mma.sync: 17.4 us at 8192x8192, M = 8, where bf16 cuBLAS takes 34; three siblings, each with a scale of its own, "
    "take the time of one layer (sm_90: 6.7 us at N = K = 4096, M = 2; one by one 19.5)"
)
_SMALL_90 = _SMALL + "; where K is a multiple of 256 cuda_table is the faster one up to 16 rows, cuda_wide above for 2^24 weights and more"
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
_TABLE = (
    "codes decoded by a table in shared memory, 2.2 machine instructions a weight, tiles fetched by a warp of its own: 14.4 us at N = K = 8192, M = 8, and 15.3 at "
    "M = 16, where cuda_small takes 17.3 and 24.7, cuda_wide 17.4; 6.4 and 7.1 at N = K = 4096: 7.4 and 9.2; 43 and 47 at N = 28672, K = 8192: 52 and 54"
)
_UNTIL_256 = "; to 256 rows where no FP8 product follows: 56 us at N = K = 8192, a transient weight alone 46 before the product's 50"
_MID = "decode in registers, tensor cores; first version: above M = 64 one transient FP8 pass costs less"
_GLU = "the GEMV's loop over rows n of gate and up, and their product: one launch, no intermediate"
_ANY_K = (
    "cuda_small with narrower copies where K is only a multiple of 16: 7.8 us at N = 4096, K = 4112, M = 1 and 2, where the GEMV takes 8.5 and 9.8; 20.2 us at "
    "N = 8192, K = 8208, where it takes 26.6 and 30; 29.7 for M = 16, where triton_mid takes 49"
)
_THEN = "act(x W + bias) * mul + residual on the float32 sums: no pointwise kernel behind an operator that Inductor cannot fuse with"
_PAIRED = "rows of gate and up in one block: act(gate) * up on their float32 sums, half the stores, no pointwise kernel behind it"
_THEN_90 = _THEN + ". With a residual 17.3 us at N = K = 8192, M = 2, in two kernels 18.9; 27.6 and 28.2 at M = 16; at M = 32 34.1 and 32.8"
_PAIRED_90 = _PAIRED + ". 7.3 us at N = K = 4096, M = 2, where the matmul alone takes 6.7, in eager steps 12.4; 32.5 at N = K = 8192, M = 32: 30.8, 37.5"
_PAIRED_WIDE = (
    _PAIRED + ". 24.4 us at N = K = 8192, M = 64, where the matmul alone takes 22.6, and 34.9 and 34.0 at M = 128; 12.1 and 10.7 at N = K = 4096, M = 64"
)
_THEN_WIDE = _THEN + ". With a residual 24.5 us at N = K = 8192, M = 64, in two kernels 24.9, and 11.6 and 12.4 at N = K = 4096"
_CUDA_WIDE = (
    "weights decoded in registers are wgmma's A operand, once for all rows; tiles of weights and activations are fetched by other warps. At N = K = 8192 "
    "18 us for M = 32, 22 for 64, 31 for 128, where bf16 cuBLAS takes 35 to 38; at N = 28672, K = 8192 55, 70, 104: 110, 119, 124; at N = K = 4096 "
    "7.8, 8.7, 12.9: 13.7, 11.9, 14.4"
)
_FP8 = "FP8 tensor cores; the transient weight costs one pass; rowwise scaled_mm writes bfloat16"
_WIDE_FP8 = (
    "weights rounded to E4M3 in registers for FP8 wgmma, no transient weight. At M = 256 16 us for N = K = 4096, 33 for 8192, 103 for N = 28672, K = 8192, where "
    "the transient weight and its product take 24, 58, 198 and bf16 cuBLAS 18, 54, 180; at M = 2048 55, 203, 692 for 61, 222, 778; at M = 4096 110, 404, 1514 for 135, 471, 1766. "
    "From 65 rows on for 2^25 weights and more: at M = 128 25 us at N = K = 8192 and 66 at N = 28672, where cuda_wide takes 31 and 99, but 14.4 and 14.6 at N = K = 4096; "
    "from 33 on above 2^26: 56 us at N = 28672, K = 8192, M = 64, cuda_wide 71, but 23.5 and 22.1 at N = K = 8192"
)
_W4A4 = "activations rounded to NVFP4 per token; pays where bf16 MMA, not weight bytes, is the limit: by data sheet above M = 33 (RTX 5090) to 79 (B200)"
_W4A4_EMULATED = "no FP4 tensor cores: activations rounded as there, then both operands in high precision; the same numbers, slower than not rounding"
_BLOCK_SCALED = "FP4 tensor cores take codes and E4M3 scales as they lie in memory"
_SPARSE_GEMV = "kept codes and gathered activations, 22% fewer bytes"
_SPARSE_GEMV_90 = _SPARSE_GEMV + ": 5.4 us at N = K = 4096, where cuda_sparse_small takes 6.3; at N = K = 8192 20.1 and 16.1"
_SPARSE_GEMV_LARGE = (
    _SPARSE_GEMV_90
    + ". Of 2^24 weights and more cuda_sparse_table is taken where it may begin early, 5.1 us at N = K = 4096; of 2^25 and more anywhere, 11.5 us for 13.5 at N = 14336, K = 4096"
)
_SPARSE_GEMV_WEIGHTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (_SPARSE_GEMV_90, {"max_weights": 2**24 - 1}),
    (_SPARSE_GEMV_90, {"min_weights": 2**24, "max_weights": 2**26 - 1, "not_k_multiple": 256}),
    (_SPARSE_GEMV_LARGE, {"min_weights": 2**24, "max_weights": 2**25 - 1, "early": False}),
)
_SPARSE_SMALL = "kept codes straight into mma.sp: half the decoding of the dense kernel for any M, 22% fewer bytes"
_SPARSE_SMALL_90 = _SPARSE_SMALL + ". 16.1 us at N = K = 8192, M = 1 to 8, and 28.5 at M = 32, where the Triton kernel takes 57 to 60 and 85, bf16 cuBLAS 35"
_SPARSE_SMALL_ELSEWHERE = _SPARSE_SMALL + "; a third of the Triton kernel's time on an H200, which has not run here either"
_SPARSE_TABLE = (
    "cuda_table's ring and its decoding on kept codes, mma.sp: 4.6 to 5.2 machine instructions for four weights, where cuda_sparse_small has 11.5. 9.9 us at N = K = 8192, "
    "M = 1 begun early, where cuda_table takes 12.3, and 11.7 for 13.8 where it may not; 9.3 and 11.5 at N = 14336, K = 4096, 9.3 and 12.3 at N = 4096, K = 14336, M = 8, "
    "32.0 and 37.0 at N = 28672, K = 8192, 4.8 and 5.0 at N = K = 4096"
)
_SPARSE_WIDE = (
    "kept codes decoded in registers are the sparse operand of wgmma: half the decoding and half the products of cuda_wide, 22% fewer bytes; tiles of the activations "
    "are fetched as they lie, by no kernel of their own. At N = K = 8192 16.8, 19.2, 24.6 us for M = 32, 64, 128, where dense weights take 18.2, 21.6, 31.3; 8.0, 8.5, 12.7 and "
    "9.4, 9.9, 14.2 at N = K = 4096; cuda_sparse_small 28.3 at N = K = 8192, M = 32. Above 128 rows 13.9, 39.9, 165 us for M = 256 at N = K = 4096, N = K = 8192 and N = 28672, "
    "K = 8192, with a transient weight 26, 63, 207; 19.5, 75.8, 248 and 26.6, 83.9, 247 for M = 384"
)
_SPARSE_MID = "the dense mid kernel on codes decompressed in registers: 1.3-1.5x its instructions, 22% fewer bytes"
_SPARSE_MID_90 = _SPARSE_MID + ". 101 us at N = K = 8192, M = 64, dense weights 70, bf16 cuBLAS 38"
_SPARSE_WIDE_FP8 = (
    "kept codes rounded to E4M3 in registers are the sparse operand of FP8 wgmma: half the products of cuda_wide_fp8, no transient weight. Products alone 15, 31, 93 us for M = 256 at "
    "N = K = 4096, N = K = 8192 and N = 28672, K = 8192, where dense weights take 16, 35, 107; 27, 91, 312 for 29, 107, 359 at M = 1024; 93, 358, 1248 for 120, 476, 1584 at M = 4096. "
    "From 65 rows on for 2^25 weights and more: 22.5 us at N = K = 8192, M = 96, and 20.4 at N = 4096, K = 14336, where cuda_sparse_wide takes 24.8 and 33.3; from 33 on above 2^26: "
    "53 us at N = 28672, K = 8192, M = 64, cuda_sparse_wide 70; but 14.7 and 14.3 at N = K = 4096, M = 256"
)
# Up to how many rows sparse_linear_wide serves before sparse_linear_wide_fp8 does.
_SPARSE_WIDE_UNTIL: tuple[tuple[int, tuple[torch.dtype, ...], tuple[str, ...], dict[str, Any]], ...] = (
    (256, BF16, FP8, {"max_weights": 2**25 - 1}),
    (64, BF16, FP8, {"min_weights": 2**25, "max_weights": 2**26}),
    (32, BF16, FP8, {"min_weights": 2**26 + 1}),
    (384, BF16, tuple(large for large in LARGE_M if large not in FP8), {}),
    (384, (torch.float16,), LARGE_M, {}),
)
_SPARSE_FP8 = "as dense large_fp8, the transient weight written from 3.5 bits instead of 4.5"
_SPARSE_FP8_90 = _SPARSE_FP8 + ": 0.83 to 0.93 of its time; 524 us at N = K = 8192, M = 4096, bf16 cuBLAS 753"
_DECODE = (
    "two launches, 11 us at Qwen3-30B, T = 1; without sorting, which pays from about 4 pairs an expert on: at 2 Mixtral takes 396 us here, 732 grouped, "
    "at 4 both 790"
)
_DECODE_90 = _DECODE.split("; without sorting")[0] + (
    "; up to 0.6 pairs an expert it is ahead of sorting them: Qwen3-30B, T = 8, 46 us, cuda_moe_wide 53; Qwen3-Next, T = 32, 0.63 of them, 139 and 132; Qwen3-30B, T = 16, one, 85 and 79"
)
_ITS_TOKENS = "mma by the steps of {}, its columns the call's tokens: an expert's weights are read and decoded once; two launches for every eight tokens. "
_MOE_TABLE = _ITS_TOKENS.format("cuda_table") + (
    "From 8 million weights, H * N, on: Mixtral, T = 1, 4, 8, 56, 139, 193 us where the Triton kernels take 59, 195 and cuda_moe_wide 200; gpt-oss, T = 4, 8, 61 and 92 for 66 and "
    "124, but T = 1 26 for 22. Behind them where experts are small: Qwen3-30B, T = 4, 32 for 27"
)
_SPARSE_MOE_TABLE = _ITS_TOKENS.format("cuda_sparse_table") + (
    "Mixtral, both products 2:4-sparse, T = 1, 4: 52 and 124 us, 0.92 and 0.90 of the dense layer's; Qwen3-30B, T = 4, 28, level with the Triton kernels"
)
_MOE_WIDE = (
    "sorted by expert, decoded in registers as the A operand of wgmma (up to 16 pairs: of mma), each weight once for up to 128 pairs; gate, up and activation in one kernel. "
    "Qwen3-30B, T = 32, 128, 1024: 94, 125, 223 us where 161, 413 and 481 are taken without; above 14 pairs an expert (24 where K is no multiple of 256) FP8 products take over"
)
# Up to how many pairs an expert it serves.
_MOE_WIDE_UNTIL: tuple[tuple[int, tuple[str, ...], dict[str, Any]], ...] = (
    (192, tuple(large_m for large_m in LARGE_M if large_m not in FP8), {"k_multiple": 64}),
    (14, FP8, {"k_multiple": 256}),
    (24, FP8, {"k_multiple": 64, "not_k_multiple": 256}),
)
_MOE_WIDE_FP8 = (
    "rounded to E4M3, weights in registers, never written: Qwen3-30B, T = 1024 and 4096, 191 and 520 us, bfloat16 products 266 and 817; Qwen3-Next, T = 4096, 608 and 840; "
    "gpt-oss 352 and 1065 (640, 1947); Mixtral 810 and 2450 (1548, 4946). With 15 or 16 pairs an expert 137, 365, 269 for 152, 393, 311 (Qwen3-30B, Qwen3-Next, Mixtral), with 8 level; "
    "gpt-oss 243 for 220 with 16, level with 24. 20 times the error, as the dense layers' FP8 products have it"
)
_GROUPED = "sorted by expert, weights decoded in registers: each is read once however many tokens share it"
_GROUPED_FP8 = (
    "above 32 tokens an expert the pass that makes transient FP8 weights pays: 2.6 million of them a microsecond, FP8 products at 0.6 to 1.1 PFLOPS; "
    "at most 1 GiB of them at once, half of what such a projection takes in bfloat16"
)
_SPARSE_DECODE = "the dense layer's two launches on kept codes and gathered activations: 22% fewer bytes, as many instructions"
_SPARSE_DECODE_90 = _SPARSE_DECODE + ": Qwen3-30B, T = 1 and 4, 11.5 and 29.8 us where dense experts take 10.8 and 27, Qwen3-Next 10.5 and 26 (10.3, 27)"
_SPARSE_GROUPED = "the dense kernel on codes decompressed in registers: nothing dense in memory"
_ATTENTION = "the cache read once, by KV head, where it lies; what the mask leaves out is not read; without repeat_kv, which copies it once for each query head"
_ATTENTION_90 = _ATTENTION + (
    ". us at 32 query and 8 KV heads of 128, 520 positions: 5.9, 14.3, 26 for 1, 8, 32 sequences, Transformers' sdpa 27, 107, 381; 2052 of 4104 filled: 9.6, 31, 83, sdpa "
    "103, 686, 2655"
)
_ATTENTION_LIBRARY = "many queries are limited by products, not by reading the cache: F.scaled_dot_product_attention"
_GROUPED_DENSE = "as above in bfloat16, at most 1 GiB of transient weights at once"


def _with_epilogue(op: str, finish: str, reason: str, measured: str, wide: str, max_m: int) -> tuple[Row, ...]:
    """The CUDA kernels of fp4.linear with more behind their sums. M = 1 stays with the GEMV where fp4.linear's rows leave it there.

    ``measured``, ``wide``: the reasons on sm_90, where the small kernel serves up to ``max_m``. Its gain of a microsecond or two says nothing of other GPUs.
    """
    small = (((80, 89), 16, reason, EMULATED), ((100, 129), 16, reason, EMULATED))
    hopper: tuple[tuple[int, dict[str, Any]], ...] = ((max_m, {"max_weights": 2**24 - 1}), (max_m, {"not_k_multiple": 256}))  # as without an epilogue
    table: tuple[dict[str, Any], ...] = ({"min_weights": 2**25, "early": True}, {"min_m": 2})
    common: dict[str, Any] = {"k_multiple": 64, "csrc": f"linear_small_{finish}", "min_m": 2}
    return (
        *(
            Row(
                op,
                "small",
                f"cuda_table_{finish}",
                (90, 90),
                16,
                HALF,
                f"{reason}. Timed in a whole model only; the product alone: {_TABLE}",
                MEASURED,
                k_multiple=256,
                csrc=f"linear_table_{finish}",
                **when,
            )
            for when in table
        ),
        *(Row(op, "small", f"cuda_small_{finish}", (90, 90), m, HALF, measured, MEASURED, **common, **when) for m, when in hopper),
        *(Row(op, "small", f"cuda_small_{finish}", a, m, HALF, why, s, **common) for a, m, why, s in small),
        *(
            Row(op, "wide", f"cuda_wide_{finish}", (90, 90), m, dtypes, wide, MEASURED, large_m, csrc=f"linear_wide_{finish}", min_m=2, **when)
            for m, dtypes, large_m, when in (
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
    *(Row("linear", "gemv", "triton_gemv", (90, 90), 1, HALF, why, MEASURED, k_multiple=64, siblings=True, **when) for why, when in _GEMV_WEIGHTS),
    Row("linear", "gemv", "triton_gemv", (80, 89), 1, HALF, _GEMV, "compiled, not run", siblings=True),
    Row("linear", "gemv", "triton_gemv", (100, 129), 1, HALF, _GEMV, "compiled, not run", siblings=True),
    Row(
        "linear",
        "gemv",
        "triton_gemv",
        (90, 90),
        4,
        HALF,
        "without the small kernel: still ahead of padding to a tensor-core tile",
        "measured on H200",
        without="small",
        siblings=True,
    ),
    Row("linear", "gemv", "triton_gemv", (80, 89), 2, HALF, "without the small kernel", "compiled, not run", without="small", siblings=True),
    Row("linear", "gemv", "triton_gemv", (100, 129), 4, HALF, "without the small kernel", "compiled, not run", without="small", siblings=True),
    Row("linear", "small", "cuda_table", (90, 90), 16, HALF, _TABLE, MEASURED, k_multiple=256, csrc="linear_table", siblings=True),
    *(
        Row("linear", "small", "cuda_small", (90, 90), m, HALF, _SMALL_90, MEASURED, k_multiple=64, csrc="linear_small", siblings=True, **when)
        for m, when in _SMALL_UNTIL
    ),
    Row("linear", "small", "cuda_small", (80, 89), 16, HALF, _SMALL, "compiled, not run", k_multiple=64, csrc="linear_small", siblings=True),
    Row("linear", "small", "cuda_small", (100, 129), 16, HALF, _SMALL, "compiled, not run", k_multiple=64, csrc="linear_small", siblings=True),
    *(Row("linear", "wide", "cuda_wide", (90, 90), m, BF16, _CUDA_WIDE, MEASURED, FP8, csrc="linear_wide", siblings=True, **when) for m, when in _WIDE_UNTIL),
    Row("linear", "wide", "cuda_wide", (90, 90), 64, HALF, _CUDA_WIDE, MEASURED, NVFP4, 64, csrc="linear_wide", siblings=True),
    Row("linear", "wide", "cuda_wide", (90, 90), 256, BF16, _CUDA_WIDE + _UNTIL_256, MEASURED, ("bf16",), 64, csrc="linear_wide", siblings=True),
    Row("linear", "wide", "cuda_wide", (90, 90), 256, (torch.float16,), _CUDA_WIDE + _UNTIL_256, MEASURED, WEIGHT_ONLY, 64, csrc="linear_wide", siblings=True),
    Row("linear", "small", "cuda_small_any_k", (90, 90), 32, HALF, _ANY_K, MEASURED, csrc="linear_small", siblings=True, not_k_multiple=64),
    Row("linear", "mid", "triton_mid", (90, 90), 64, HALF, _MID, MEASURED, without="wide", siblings=True),
    Row("linear", "mid", "triton_mid", (80, 88), 256, HALF, "as on sm_90; no FP8 tensor cores to hand over to", "compiled, not run", siblings=True),
    Row("linear", "mid", "triton_mid", (89, 89), 64, HALF, _MID, "compiled, not run", siblings=True),
    Row("linear", "mid", "triton_mid", (100, 129), 64, HALF, _MID, "compiled, not run", siblings=True),
    Row("linear", "cpu", "cpu", (0, 0), 64, ANY, "as above: few rows keep their activations", "runs in CI", NVFP4),
    Row("linear", "large_dense", "dequantize + mm", (80, 129), 64, (torch.float32,), "float32: few rows keep their activations", "measured on H200", NVFP4),
    Row("linear", "large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4", (0, 0), None, ANY, _W4A4_EMULATED, "runs in CI", NVFP4),
    Row("linear", "large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4", (80, 99), None, ANY, _W4A4_EMULATED, "compiled, not run", NVFP4, siblings=True),
    Row("linear", "large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4", (100, 129), None, ANY, _W4A4, "compiled, not run", NVFP4, siblings=True),
    Row("linear", "wide_fp8", "cuda_wide_fp8", (90, 90), 8192, BF16, _WIDE_FP8, MEASURED, FP8, 256, 16, csrc="linear_wide_fp8", siblings=True),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (90, 90), None, BF16, _FP8, "measured on H200", FP8, 16, 16, siblings=True),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (89, 89), None, BF16, _FP8, "compiled, not run", FP8, 16, 16, siblings=True),
    Row("linear", "large_fp8", "dequantize_fp8 + scaled_mm", (100, 129), None, BF16, _FP8, "compiled, not run", FP8, 16, 16, siblings=True),
    Row(
        "linear",
        "large_dense",
        "dequantize + mm",
        (80, 129),
        None,
        ANY,
        "transient weight in the activation's dtype, the library GEMM",
        "measured on H200",
        siblings=True,
    ),
    Row("linear_w4a4", "cpu", "cpu", (0, 0), None, ANY, "activations in float32, the C kernel of fp4.linear: no gain, to judge quality", "runs in CI"),
    Row("linear_w4a4", "large_nvfp4", "cuda_w4a4", (120, 121), None, HALF, "mma.sync " + _BLOCK_SCALED, EMULATED, k_multiple=64, csrc="linear_w4a4"),
    Row("linear_w4a4", "large_nvfp4", "triton_w4a4", (100, 120), None, HALF, _BLOCK_SCALED, "compiled, not run", siblings=True),
    Row("linear_w4a4", "large_nvfp4", "triton_w4a4", (121, 129), None, HALF, _BLOCK_SCALED, "compiled, not run", siblings=True, triton=(3, 8)),
    Row("linear_w4a4", "large_dense", "dequantize both + mm", (80, 129), None, ANY, _W4A4_EMULATED, "compiled, not run", siblings=True),
    Row("linear_glu", "gemv", "triton_gemv_glu", (80, 129), 1, HALF, _GLU, EMULATED),
    *_with_epilogue("linear_glu", "glu", _PAIRED, _PAIRED_90, _PAIRED_WIDE, 32),
    Row("linear_glu", "unfused", "linear, then act * up", (0, 129), None, ANY, "fp4.linear by its own rows; the product is a pointwise kernel", "runs in CI"),
    *_with_epilogue("linear_epilogue", "pointwise", _THEN, _THEN_90, _THEN_WIDE, 16),
    Row("linear_epilogue", "unfused", "linear, then pointwise", (0, 129), None, ANY, "fp4.linear by its own rows; Inductor fuses the rest", "runs in CI"),
    Row("linear_fp8", "cpu", "cpu", (0, 0), None, ANY, "float32 products of cached blocks: saves memory, not time", "runs in CI", k_multiple=1),
    Row("linear_fp8", "gemv", "triton_gemv_fp8", (80, 129), 1, HALF, "bandwidth-bound: half the bytes of bf16", "compiled, not run", k_multiple=1),
    Row(
        "linear_fp8",
        "large_fp8",
        "scaled_mm",
        (89, 129),
        None,
        BF16,
        "FP8 tensor cores, activations rounded per row",
        "compiled, not run",
        FP8,
        16,
        16,
    ),
    Row("linear_fp8", "large_dense", "cast + mm", (80, 129), None, ANY, "transient weight in the activation's dtype", "compiled, not run", k_multiple=1),
    Row("sparse_linear", "cpu", "cpu", (0, 0), None, ANY, "C kernel: GEMV on the kept weights for M <= 8, else as dense", "runs in CI"),
    *(Row("sparse_linear", "gemv", "triton_sparse_gemv", (90, 90), 1, HALF, why, MEASURED, **when) for why, when in _SPARSE_GEMV_WEIGHTS),
    Row("sparse_linear", "gemv", "triton_sparse_gemv", (90, 90), 1, HALF, _SPARSE_GEMV_90, "measured on H200", without="small"),
    Row("sparse_linear", "gemv", "triton_sparse_gemv", (80, 89), 1, HALF, _SPARSE_GEMV, "compiled, not run"),
    Row("sparse_linear", "gemv", "triton_sparse_gemv", (100, 129), 1, HALF, _SPARSE_GEMV, "compiled, not run"),
    Row(
        "sparse_linear",
        "small",
        "cuda_sparse_table",
        (90, 90),
        16,
        HALF,
        _SPARSE_TABLE,
        MEASURED,
        k_multiple=256,
        csrc="sparse_linear_table",
        n=(16, 2**31),
    ),
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
    Row("sparse_linear", "large_dense", "sparse_dequantize + mm", (80, 129), None, ANY, "as dense large_dense", "compiled, not run"),
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
            large_m,
            n_multiple=8,
            csrc="moe_grouped_wide",
            m_per_expert=float(until),
            plain=True,
            **when,
        )
        for until, large_m, when in _MOE_WIDE_UNTIL
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
    Row("moe", "large_dense", "dequantize + grouped_mm", (80, 129), None, BF16, _GROUPED_DENSE, "compiled, not run", k_multiple=16, n_multiple=16),
    Row("moe", "grouped", "triton_moe_grouped", (80, 129), None, (torch.float16,), "torch._grouped_mm takes bfloat16 only", "compiled, not run"),
    Row(
        "moe", "by_expert", "by expert", (80, 129), None, ANY, "no tensor cores for this dtype or shape; reads the ids back: no CUDA graph", "compiled, not run"
    ),
    Row("sparse_moe", "cpu", "cpu", (0, 0), None, ANY, "expert by expert, only those with tokens, through the C kernels of fp4.sparse_linear", "runs in CI"),
    *(
        Row("sparse_moe", "decode", "triton_sparse_moe_decode", arch, 4, HALF, why, status, m_per_expert=3.0, without="table")
        for arch, why, status in (((90, 90), _SPARSE_DECODE_90, MEASURED), ((80, 89), _SPARSE_DECODE, COMPILED), ((100, 129), _SPARSE_DECODE, COMPILED))
    ),
    Row("sparse_moe", "grouped", "triton_sparse_moe_grouped", (80, 129), 64, HALF, _SPARSE_GROUPED, "compiled, not run", m_per_expert=32.0),
    Row(
        "sparse_moe",
        "large_fp8",
        "sparse_dequantize_fp8 + triton_grouped_fp8",
        (90, 90),
        None,
        BF16,
        _GROUPED_FP8,
        "measured on H200",
        FP8,
    ),
    Row("sparse_moe", "large_dense", "sparse_dequantize + grouped_mm", (80, 129), None, BF16, _GROUPED_DENSE, "compiled, not run", n_multiple=16),
    Row(
        "sparse_moe",
        "grouped",
        "triton_sparse_moe_grouped",
        (80, 129),
        None,
        (torch.float16,),
        "as dense: torch._grouped_mm takes bfloat16",
        "compiled, not run",
    ),
    Row("sparse_moe", "by_expert", "by expert", (80, 129), None, ANY, "as dense: float32 and odd shapes; no CUDA graph", "compiled, not run"),
    # M: queries times the heads that share a KV head; N: heads; K: width of a head.
    *(
        Row("decode_attention", "attention", "triton_decode_attention", arch, 16, HALF, why, status, k_multiple=8, plain=True)
        for arch, why, status in (((90, 90), _ATTENTION_90, MEASURED), ((80, 89), _ATTENTION, COMPILED), ((100, 129), _ATTENTION, COMPILED))
    ),
    Row("decode_attention", "library", "sdpa", (0, 129), None, ANY, _ATTENTION_LIBRARY, "runs in CI", k_multiple=1),
)
