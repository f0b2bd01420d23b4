"""fp4.moe by the kernels of ``csrc/moe/grouped_wide.cu`` and ``grouped_wide_fp8.cu``: ``torch.ops.fp4_csrc.moe_grouped_wide`` and ``moe_grouped_wide_fp8``,
internal operators that :mod:`.cuda` calls.
"""

from __future__ import annotations

from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import host
from ..forms import Launches, Library
from ..kernel import BF16, MEASURED, Kernel, On
from ..kernel import FP8 as FP8_PREFILL

NAME, FP8 = "moe_grouped_wide", "moe_grouped_wide_fp8"


def tile(pairs: int, experts: int, k: int, inner: int) -> int:
    """Pairs of one expert that a block multiplies at a time, and one more where it gathers their tokens itself: the fastest of those compiled on an H200, for
    ``pairs`` spread over ``experts``. To gather pays where few blocks of rows read what was gathered: Qwen3-30B (I = 768), T = 1024, 223 us for 278; Mixtral
    (I = 14336) 1500 for 1257."""
    mean = pairs / max(experts, 1)
    if k % 256 == 0 and inner <= 1024:
        return next((tokens for most, tokens in ((6, 9), (12, 17), (24, 33), (40, 49), (70, 81), (88, 97)) if mean <= most), 129)
    return next((tokens for most, tokens in ((6, 8), (12, 16), (24, 32), (40, 48), (88, 96)) if mean <= most), 128)


def tile_fp8(pairs: int, experts: int) -> int:
    """The most pairs of one expert that a cluster multiplies at a time (those of an expert are divided evenly among tiles of at most so many): the fastest on
    an H200, Qwen3-30B, Qwen3-Next, gpt-oss and Mixtral at 20 to 1024 pairs an expert."""
    mean = pairs / max(experts, 1)
    return next((tokens for most, tokens in ((40, 64), (88, 96), (104, 128), (400, 192)) if mean <= most), 256)


def launch(call: MoeCall, arch: int, tokens: int = 0, fp8: bool = False) -> Tensor:
    """``[T, N]``; four to six launches. ``call``: dense in memory, as :func:`.cuda.dense` makes it, of dense weights.

    ``tokens``: one of the tiles of the source; 0: :func:`tile`, or :func:`tile_fp8`.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    from . import on_csrc

    assignments, experts = call.assignments, call.experts
    tokens = tokens or (tile_fp8(assignments, experts) if fp8 else tile(assignments, experts, call.hidden.shape[1], call.inner))
    return on_csrc.launch(FP8 if fp8 else NAME, call, tokens, arch)


_WIDE = (
    "pairs sorted by expert, each weight decoded in registers once for up to 128 of them: Qwen3-30B, 32 and 1024 tokens, 94 and 223 "
    "us, 161 and 481 without; FP8 products serve more pairs an expert"
)
_WIDE_FP8 = (
    "weights rounded to E4M3 in registers, never written: Qwen3-30B, 1024 and 4096 tokens, 191 and 520 us, bfloat16 products 266 and "
    "817; 20 times the error, as of dense FP8 products"
)


def wide(call: MoeCall, tokens: int = 0) -> Tensor:
    """bfloat16 products; ``call``: dense in memory."""
    return launch(call, host.arch(call.hidden.device), tokens)


def wide_fp8(call: MoeCall, tokens: int = 0) -> Tensor:
    """FP8 products of weights rounded to E4M3 in registers: six launches; see ``csrc/moe/grouped_wide_fp8.cu``."""
    return launch(call, host.arch(call.hidden.device), tokens, fp8=True)


LIBRARY, LIBRARY_FP8 = (Library(f"moe/grouped_wide{fp8}.cu", finish=None, apart=True) for fp8 in ("", "_fp8"))
KERNELS = (
    Kernel(
        "moe", "cuda_moe_wide", "wide", (On(90, 90, MEASURED, _WIDE),), BF16, k_multiple=64, n_multiple=8, plain=True,
        batch=(1, "the tile follows the number of pairs an expert"), form=Launches("moe.grouped_wide:wide", LIBRARY),
    ),
    Kernel(
        "moe", "cuda_moe_wide_fp8", "wide_fp8", (On(90, 90, MEASURED, _WIDE_FP8),), BF16, FP8_PREFILL, k_multiple=64, n_multiple=8, plain=True,
        batch=(1, "not examined"), form=Launches("moe.grouped_wide:wide_fp8", LIBRARY_FP8),
    ),
)  # fmt: skip
