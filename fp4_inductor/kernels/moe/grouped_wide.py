"""fp4.moe by the kernels of ``csrc/moe/grouped_wide.cu`` and ``grouped_wide_fp8.cu``: ``torch.ops.fp4_csrc.moe_grouped_wide`` and ``moe_grouped_wide_fp8``,
internal operators that :mod:`.cuda` calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import host
from ..forms import Launches, Library
from ..kernel import BF16, MEASURED, Kernel, On
from ..kernel import FP8 as FP8_PREFILL

NAME, FP8 = "moe_grouped_wide", "moe_grouped_wide_fp8"


class Tile(NamedTuple):
    """``tokens``: pairs of one expert that a block multiplies at a time. ``gathers``: the first product gathers their tokens itself, instead of reading what a
    kernel before it gathered. The FP8 products have one form, in which ``gathers`` is False."""

    tokens: int
    gathers: bool = False


def tile(pairs: int, experts: int, k: int, inner: int) -> Tile:
    """The fastest of those compiled on an H200, for ``pairs`` spread over ``experts``. To gather pays where few blocks of rows read what was gathered:
    Qwen3-30B (I = 768), T = 1024, 223 us for 278; Mixtral (I = 14336) 1500 for 1257."""
    gathers = k % 256 == 0 and inner <= 1024
    bounds = ((6, 8), (12, 16), (24, 32), (40, 48), *([(70, 80)] if gathers else []), (88, 96))
    return Tile(_first(bounds, pairs, experts, 128), gathers)


def tile_fp8(pairs: int, experts: int) -> Tile:
    """``tokens``: the most pairs of one expert that a cluster multiplies at a time (those of an expert are divided evenly among tiles of at most so many). The
    fastest on an H200, Qwen3-30B, Qwen3-Next, gpt-oss and Mixtral at 20 to 1024 pairs an expert."""
    return Tile(_first(((40, 64), (88, 96), (104, 128), (400, 192)), pairs, experts, 256))


def _first(bounds: Sequence[tuple[int, int]], pairs: int, experts: int, last: int) -> int:
    """The ``tokens`` of the first of ``(most, tokens)`` whose ``most`` an expert's pairs do not exceed on average; ``last``, if they exceed all."""
    mean = pairs / max(experts, 1)
    return next((tokens for most, tokens in bounds if mean <= most), last)


def launch(call: MoeCall, arch: int, asked: Tile | None = None, fp8: bool = False) -> Tensor:
    """``[T, N]``; four to six launches. ``call``: dense in memory, as :func:`.cuda.dense` makes it, of dense weights.

    ``asked``: one of the tiles of the source; None: :func:`tile`, or :func:`tile_fp8`.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    from . import on_csrc

    assignments, experts = call.assignments, call.chosen_from
    tokens, gathers = asked or (tile_fp8(assignments, experts) if fp8 else tile(assignments, experts, call.hidden.shape[1], call.inner))
    return on_csrc.launch(FP8 if fp8 else NAME, call, tokens, int(gathers), arch)


_WIDE = (
    "pairs sorted by expert, each weight decoded in registers once for up to 128 of them: Qwen3-30B, 32 and 1024 tokens, 94 and 223 "
    "us, 161 and 481 without; FP8 products serve more pairs an expert"
)
_WIDE_FP8 = (
    "weights rounded to E4M3 in registers, never written: Qwen3-30B, 1024 and 4096 tokens, 191 and 520 us, bfloat16 products 266 and "
    "817; 20 times the error, as of dense FP8 products"
)


def wide(call: MoeCall, asked: Tile | None = None) -> Tensor:
    """bfloat16 products; ``call``: dense in memory."""
    return launch(call, host.arch(call.hidden.device), asked)


def wide_fp8(call: MoeCall, asked: Tile | None = None) -> Tensor:
    """FP8 products of weights rounded to E4M3 in registers: six launches; see ``csrc/moe/grouped_wide_fp8.cu``."""
    return launch(call, host.arch(call.hidden.device), asked, fp8=True)


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
