"""Keys and values of a cache in 8 and 4 bits. Torch only; :mod:`fp4_inductor.ops.cached_attention` says how a cache is read and written.

A token has a key and a value ``[D]`` in each head. A *kind* says how one of them is stored, with one float16 scale for each token and head:

    ============  =======================================  ==========  ============================================  ===============
    kind          codes                                    scale       value[d]                                      bits a number
    ============  =======================================  ==========  ============================================  ===============
    ``"fp8"``     float8_e4m3fn ``[..., D]``               amax / 448  code[d] * scale                               8 + 16 / D
    ``"int8"``    int8 ``[..., D]``, -127 to 127           amax / 127  code[d] * scale                               8 + 16 / D
    ``"nvfp4"``   uint8 ``[..., D/2]``, even d in the low  amax / 1536 e2m1(code[d]) * block[d // 16] * scale        4.5 + 16 / D
                  nibble; blocks float8_e4m3fn
                  ``[..., D/16]``
    ============  =======================================  ==========  ============================================  ===============

A block's scale of ``"nvfp4"`` is max / 6 or max / 4 of its 16 numbers, whichever leaves the smaller squared error ("4/6"); 1536 = 6 * 256 leaves room for
the latter. A *format* of a cache is a kind for keys and one for values:

    ============  =======  ==========  ===================================================================  ============================
    format        keys     values      besides                                                              bits a pair of numbers
    ============  =======  ==========  ===================================================================  ============================
    ``"fp8"``     fp8      fp8         the mean of keys                                                     16 + 32 / D: 16.25 at D = 128
    ``"k8v4"``    int8     nvfp4       the mean of keys                                                     12.5 + 32 / D: 12.75
    ``"nvfp4"``   nvfp4    nvfp4       the mean of keys; the first 4 and the last 64 tokens exact           9 + 32 / D: 9.25
    ============  =======  ==========  ===================================================================  ============================

**The mean of keys** ``[..., D]`` float32 is subtracted before they are rounded and added after: models whose keys have a large constant part (the bias of
Qwen 2.5) would lose all else to it. It is that of the first tokens of a sequence (:data:`MEAN_TOKENS`), and stays. **The exact tokens**: 4 bits for keys
cost little once the first tokens, to which much of attention goes, and the latest are not rounded.

A row with NaN or Inf is NaN in its token and head, and nowhere else. A row of zeros is zeros.
Source: NVIDIA, "Introducing NVFP4" (2025); Cook et al., "Four Over Six" (arXiv 2512.02010); Zhang et al., "SageAttention2" (arXiv 2411.10958), for the mean
of keys; Liu et al., "KIVI" (arXiv 2402.02750), for the latest tokens; Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv
2309.17453), for the first; vLLM issue 53770 has ``fp8`` keys and ``nvfp4`` values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, DTypeError, ShapeError
from . import e2m1, nvfp4

GROUP = nvfp4.GROUP
SCALE_DTYPE = torch.float16
MEAN_TOKENS = 128  # of the first call over an empty cache, at most: as good as a mean over a calibration text
FIRST, LAST = 4, 64  # tokens that "nvfp4" keeps exact
_LEAST_SCALE = 2.0**-24  # the smallest positive float16: a row that is not zero has a scale that is not
_MOST_SCALE = 65504.0


class Kind(NamedTuple):
    """How the numbers of one head of one token are stored. ``top``: the largest number that a scale of 1 represents."""

    name: str
    dtype: torch.dtype
    top: float
    packed: int  # numbers in one element of the codes
    blocks: bool

    def bits(self, width: int) -> float:
        """Of one number in a head of ``width``, its part of the scales included."""
        return 8 / self.packed + (8 / GROUP if self.blocks else 0) + 16 / width


FP8 = Kind("fp8", torch.float8_e4m3fn, 448.0, 1, False)
INT8 = Kind("int8", torch.int8, 127.0, 1, False)
NVFP4 = Kind("nvfp4", torch.uint8, 6.0 * 256.0, 2, True)


class Format(NamedTuple):
    """Of a cache."""

    name: str
    key: Kind
    value: Kind
    exact: bool

    def bits(self, width: int) -> float:
        """Of one number of a key and one of a value, without the exact tokens."""
        return self.key.bits(width) + self.value.bits(width)


FORMATS = {f.name: f for f in (Format("fp8", FP8, FP8, False), Format("k8v4", INT8, NVFP4, False), Format("nvfp4", NVFP4, NVFP4, True))}
DENSE = "bf16"  # the dtype of the model, whatever that is
NAMES = (DENSE, *FORMATS)


class Rows(NamedTuple):
    """``[..., D]`` numbers: ``codes [..., D or D/2]``, ``scale [...]`` float16, and of ``"nvfp4"`` ``blocks [..., D/16]`` float8_e4m3fn, else None."""

    codes: Tensor
    scale: Tensor
    blocks: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Of ``change`` of each tensor."""
        return Rows(change(self.codes), change(self.scale), None if self.blocks is None else change(self.blocks))


def named(name: str) -> Format | None:
    """The format of that name; None: the dtype of the model.

    Raises:
        ConfigError: there is none.
    """
    if name not in NAMES:
        raise ConfigError("KV cache: unknown format", value=repr(name), limit=list(NAMES), remedy="fp4_inductor.KVCache describes them.")
    return FORMATS.get(name)


def of_dtypes(keys: torch.dtype, values: torch.dtype) -> Format | None:
    """The format whose codes have these dtypes; None: there is none."""
    return next((f for f in FORMATS.values() if (f.key.dtype, f.value.dtype) == (keys, values)), None)


def check_width(width: int) -> None:
    """Raise ShapeError unless heads of this width can be stored in 8 and 4 bits."""
    if width < GROUP or width % GROUP:
        raise ShapeError("KV cache: heads of a width that has no blocks of 16", value=width, limit="multiples of 16", remedy=f'Use kv="{DENSE}".')


def shapes(kind: Kind, lead: tuple[int, ...], width: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Of codes, scale and blocks, of rows ``[*lead, width]``."""
    return (*lead, width // kind.packed), lead, (*lead, width // GROUP) if kind.blocks else None


def empty(kind: Kind, lead: tuple[int, ...], width: int, device: torch.device) -> Rows:
    """Rows of zeros."""
    e2m1.decode(torch.zeros(1, dtype=torch.uint8, device=device))  # its table is made here, for it cannot be made while a CUDA graph is captured
    codes, scale, blocks = shapes(kind, lead, width)
    held = None if blocks is None else torch.zeros(blocks, dtype=nvfp4.SCALE_DTYPE, device=device)
    return Rows(torch.zeros(codes, dtype=kind.dtype, device=device), torch.zeros(scale, dtype=SCALE_DTYPE, device=device), held)


def check_rows(kind: Kind, rows: Rows, width: int) -> None:
    """Raise unless the tensors can be rows of ``width`` numbers. Reads no values.

    Raises:
        ShapeError: of the width, or of a tensor. DTypeError: of a tensor.
    """
    check_width(width)
    dtypes = (kind.dtype, SCALE_DTYPE, nvfp4.SCALE_DTYPE)
    for name, t, shape, dtype in zip(Rows._fields, rows, shapes(kind, tuple(rows.codes.shape[:-1]), width), dtypes, strict=True):
        if t is None or shape is None:
            if t is not shape:
                raise ShapeError(f"KV cache: {name} of {kind.name}", value="none" if t is None else tuple(t.shape), limit=shape or "none", remedy=_TOGETHER)
        elif t.dtype != dtype:
            raise DTypeError(f"KV cache: {name} of {kind.name}", value=t.dtype, limit=dtype, remedy=_TOGETHER)
        elif tuple(t.shape) != shape:
            raise ShapeError(f"KV cache: {name} of {kind.name}", value=tuple(t.shape), limit=shape, remedy=_TOGETHER)


_TOGETHER = "Take the tensors of one cache: fp4_inductor.KVCache(model, max_length, batch, kv=...)."


def quantize(x: Tensor, kind: Kind, mean: Tensor | None = None) -> Rows:
    """``x [..., S, D]`` in rows. ``mean``: float32 ``[..., D]``, subtracted first."""
    wide = x.float() if mean is None else x.float() - mean[..., None, :]
    amax = wide.abs().amax(-1)
    # By a tensor: CUDA divides by a number with its rounded reciprocal, and the scale would differ from the CPU's by a bit.
    scale = (amax / torch.full_like(amax, kind.top)).clamp(_LEAST_SCALE, _MOST_SCALE).to(SCALE_DTYPE)
    scale = torch.where(amax > 0, scale, torch.zeros_like(scale))
    finite = torch.isfinite(amax)
    scale = torch.where(finite, scale, torch.full_like(scale, float("nan")))
    divisor = torch.where(finite & (amax > 0), scale.float(), torch.ones_like(amax))
    y = torch.where(finite[..., None], wide, torch.zeros_like(wide)) / divisor[..., None]
    if kind.name == "fp8":
        return Rows(y.clamp(-kind.top, kind.top).to(kind.dtype), scale)
    if kind.name == "int8":
        return Rows(y.round().clamp(-kind.top, kind.top).to(kind.dtype), scale)
    groups = y.unflatten(-1, (-1, GROUP))
    blocks = nvfp4.choose_scale_codes(groups, "four_over_six", None).view(nvfp4.SCALE_DTYPE)
    s = blocks.float()
    codes = e2m1.encode(groups / torch.where(s > 0, s, torch.ones_like(s))[..., None])
    return Rows(e2m1.pack(codes.flatten(-2)), scale, blocks)


def dequantize(rows: Rows, kind: Kind, mean: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[..., S, D]`` in ``dtype``: in float32, code times block times scale (each product rounded), plus ``mean [..., D]``; then rounded to ``dtype``."""
    scale = rows.scale.float()[..., None]
    if rows.blocks is None:
        x = rows.codes.float() * scale
    else:
        groups = e2m1.decode(e2m1.unpack(rows.codes)).unflatten(-1, (-1, GROUP))
        x = (groups * rows.blocks.float()[..., None]).flatten(-2) * scale  # the first product has six significant bits: exact
    return (x if mean is None else x + mean[..., None, :]).to(dtype)


def indexable(t: Tensor) -> Tensor:
    """``t``, or its bytes where it is float8, which torch indexes not."""
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def mean_of(keys: Tensor) -> Tensor:
    """``keys [..., S, D]`` -> float32 ``[..., D]``: the mean of the first :data:`MEAN_TOKENS` tokens, of what is finite in them."""
    first = keys[..., :MEAN_TOKENS, :].float().contiguous()  # or the sum would be in another order
    finite = torch.isfinite(first)
    return torch.where(finite, first, torch.zeros_like(first)).sum(-2) / finite.sum(-2).clamp(min=1)


# Caches are made with a multiple of so many slots, whose scales are whole units of 16 bytes: kernels copy them in bulk.
SLOTS = 8


def exact_slots(max_length: int, rollback: int) -> int:
    """How many tokens the exact ones of a cache take: with ``rollback`` more, the last 64 are there after that many were taken back."""
    return FIRST + min(LAST + rollback, max_length)


def exact_slot(position: Tensor, slots: int) -> Tensor:
    """Where the token at ``position`` lies among ``slots`` exact ones: the first 4 at the begin, the others in a ring behind them."""
    return torch.where(position < FIRST, position, FIRST + (position - FIRST) % (slots - FIRST))


def exact_position(newest: Tensor, slots: int) -> Tensor:
    """``[slots]``: the position of the token in each slot after that at ``newest`` was written; negative: there is none."""
    slot = torch.arange(slots, device=newest.device)
    place, latest = slot - FIRST, newest - FIRST
    ring = latest - (latest - place) % (slots - FIRST) + FIRST
    ring = torch.where((ring >= FIRST) & (ring <= newest), ring, -1)
    return torch.where(slot < FIRST, torch.where(slot <= newest, slot, -1), ring)


def is_exact(query: Tensor, position: Tensor) -> Tensor:
    """Does a query at ``query`` attend to the exact token at ``position``, or to the rounded one? Broadcasts."""
    return (position < FIRST) | (position > query - LAST)
