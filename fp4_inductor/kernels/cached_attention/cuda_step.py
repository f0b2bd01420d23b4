"""cuda_step_attention, and cuda_step_attention_codes: one launch for one new token of each sequence. Source: ``csrc/attention/step.cuh``.

The first takes caches in the dtype of the query, the second those in fp8 and in k8v4, by libraries of their own.

M of its problem is the heads that share a KV head, N heads, K the width of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ops.cached_call import CachedCall
from .. import host, params
from ..asked import NO_COUNTERS, cache_in
from ..forms import Launches, Library
from ..kernel import COMPILED, MEASURED_H100, Kernel, On
from ..paged_attention.cuda import NOT_ROUNDED, OWN, Tile, readable
from .cuda import ALONE, cache_fields, call_fields
from .step import Arguments, arguments

LIBRARY = Library("attention/step_attention.cu", finish=None)
LIBRARY_OF_CODES = Library("attention/step_attention_codes.cu", finish=None)
NAME, NAME_OF_CODES = "cuda_step_attention", "cuda_step_attention_codes"
WIDTHS = (64, 128)  # that the source compiles
FORMATS = ("fp8", "k8v4")


def fields(c: CachedCall, a: Arguments, tile: Tile = OWN) -> dict[str, Any]:
    """Of :class:`params.AttentionParams`, but for y and stream.

    A 0 of ``tile`` leaves it to the kernel.
    """
    if c.stored is None:
        return dict(call_fields(c, a), keys=dict(codes=c.keys), values=dict(codes=c.values), format=NOT_ROUNDED, tile=tile)
    return dict(call_fields(c, a), **cache_fields(c), tile=tile)


def _aligned(a: Arguments) -> Arguments:
    """With rows that begin at multiples of 16 bytes."""
    q_norm, k_norm, cos, sin = (None if t is None else readable(t) for t in (*a.norms, *a.angles))
    return a._replace(query=readable(a.query), key=readable(a.key), value=readable(a.value), norms=(q_norm, k_norm), angles=(cos, sin))


def step(c: CachedCall, tile: Tile = OWN) -> Tensor:
    """``[B, Q, H, D]``. ``select.cached_form(c)`` is empty, or says that there are no counters, and nothing of ``c`` is empty.

    Raises:
        KernelError: the launch was refused.
    """
    from .. import csrc  # which reads the list of kernels

    a = _aligned(arguments(ALONE, c))
    of = f"query {tuple(c.query.shape)} over {tuple(c.keys.shape)}"
    library = LIBRARY if c.stored is None else LIBRARY_OF_CODES
    csrc.launch(library, params.AttentionParams, fields(c, a, tile), a.out, host.arch(c.query.device), of)
    return a.out


_WHY = "as on sm_90"
_WHY_90 = "the blocks of a cluster send each other their results: 520 tokens of a sequence 5.9 us on an H100 (triton_cached_attention 8.9)"
_WHY_CODES_90 = "as cuda_step_attention: 520 tokens of a sequence in k8v4 6.9 us on an H100 (cuda_quantized_attention 8.7)"
_BATCH = (1, "the number of blocks follows the numbers of sequences and KV heads, not M")
KERNELS = (
    Kernel(
        "cached_attention", NAME, "step_attention", (On(90, 90, MEASURED_H100, _WHY_90), On(100, 129, COMPILED, _WHY)), only_k=WIDTHS,
        serves=(NO_COUNTERS,), batch=_BATCH, form=Launches("cached_attention.cuda_step:step", LIBRARY),
    ),
    Kernel(
        "cached_attention", NAME_OF_CODES, "step_attention", (On(90, 90, MEASURED_H100, _WHY_CODES_90), On(100, 129, COMPILED, _WHY)), only_k=WIDTHS,
        forms=tuple(map(cache_in, FORMATS)), serves=(NO_COUNTERS,), batch=_BATCH, form=Launches("cached_attention.cuda_step:step", LIBRARY_OF_CODES),
    ),
)  # fmt: skip
