"""NVFP4: E2M1 codes, one E4M3 scale per 16 consecutive k, one float32 scale per matrix.

    value[n, k] = e2m1(code[n, k]) * scale[n, k // 16] * global_scale

The global scale **multiplies** (the ModelOpt and torchao convention; compressed-tensors stores its reciprocal).
Source: NVIDIA, "Introducing NVFP4" (2025); block scaling as in the PTX ISA's ``mxf4nvf4`` with ``scale_vec::4X``.

All functions take ``[..., N, K]`` with any number of leading (expert) dimensions; ``global_scale`` has the leading
shape: ``[]`` for a matrix, ``[E]`` for experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import ConfigError, DeviceError, DTypeError, NonFiniteError, ShapeError
from . import e2m1
from .storage import Part, Storage

NAME = "nvfp4"
GROUP = 16
SCALE_DTYPE = torch.float8_e4m3fn
SCALE_MAX = 448.0
HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
BITS_PER_WEIGHT = 4 + 8 / GROUP
SCALES = (Part("scale", SCALE_DTYPE, GROUP), Part("global_scale", torch.float32, 0))
STORAGE = Storage(NAME, (Part("qdata", torch.uint8, 2), *SCALES), GROUP, BITS_PER_WEIGHT)

# With amax/(6*448) the block that holds the tensor's maximum sits at the top of E4M3 and cannot be scaled up;
# a search that wants to go up leaves it headroom.
_TOP = {"amax": SCALE_MAX, "four_over_six": 256.0, "mse": 256.0, "activation": 256.0}
SCALE_SEARCHES = tuple(_TOP)
_SWEEP = range(-7, 8)  # E4M3 codes around amax/6: a factor 0.55 to 1.83; weighted sums go all the way down (outliers in idle channels)
SCALE_MAX_BYTE = 0x7E  # of a block scale: 0x7F is NaN; from 0x80 on the sign bit is set, which no scale has
_SCALE_MIN_BYTE = 1  # of one that is not zero
_TINY = torch.finfo(torch.float32).tiny
_LOAD_FIRST = "Load the weights (to_empty, then load_state_dict) before quantizing."
_CHUNK = 1 << 22  # weights handled at once: bounds the temporaries to about 100 MB


def global_scale_of(amax: Tensor, scale_search: str = "amax") -> Tensor:
    """float32 global scale for a tensor (or per expert) whose largest magnitude is ``amax`` (>= 0).

    The largest representable value, ``6 * 448 * global_scale``, stays finite in ``amax.dtype``.
    """
    # By a tensor: CUDA divides by a number with its rounded reciprocal, and the scale would differ from the CPU's by a bit.
    scale = amax.float() / torch.full_like(amax, e2m1.MAX * _TOP[scale_search], dtype=torch.float32)
    largest = torch.finfo(amax.dtype).max / (e2m1.MAX * SCALE_MAX) * (1 - 2.0**-23)
    return torch.where(amax > 0, scale.clamp(_TINY, largest), torch.ones_like(scale))


def quantize(
    w: Tensor,
    scale_search: str = "amax",
    global_scale: Tensor | None = None,
    channel_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``w`` to NVFP4.

    Args:
        w: ``[..., N, K]`` bfloat16, float16 or float32, finite; K a multiple of 16.
        scale_search: one of :data:`SCALE_SEARCHES`.
        global_scale: float32 with the leading shape of ``w`` (``[]`` for a matrix), multiplying, > 0; derived from the
            maximum if None. Give it to share one scale between fused projections.
        channel_weight: ``[K]`` float32 >= 0, E[x^2] of each input channel; needed by ``"activation"``.

    Returns:
        ``(qdata uint8 [..., N, K/2], scale float8_e4m3fn [..., N, K/16], global_scale float32 [...])``.

    Raises:
        DTypeError, ShapeError, DeviceError, NonFiniteError, ConfigError.
    """
    g, weight = checked_options(w, scale_search, global_scale, channel_weight)
    lead, (n, k) = tuple(w.shape[:-2]), w.shape[-2:]
    rows, row_scale = w.flatten(0, -2), scale_of_rows(g, n)
    qdata = torch.empty(rows.shape[0], k // 2, dtype=torch.uint8, device=w.device)
    scale = torch.empty(rows.shape[0], k // GROUP, dtype=SCALE_DTYPE, device=w.device)
    for part in row_chunks(rows.shape[0], k) if k else ():
        blocks = rows[part].float().unflatten(-1, (-1, GROUP)) / row_scale[part, None, None]
        codes = choose_scale_codes(blocks, scale_search, weight)
        s = codes.view(SCALE_DTYPE).float()
        qdata[part] = e2m1.pack(e2m1.encode(_divide(blocks, s)).flatten(-2))
        scale[part] = codes.view(SCALE_DTYPE)
    return qdata.view(*lead, n, k // 2), scale.view(*lead, n, k // GROUP), g


def checked_options(w: Tensor, scale_search: str, global_scale: Tensor | None, channel_weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The global scale of each matrix (the leading shape of ``w``) and the weight of each channel that :func:`quantize` uses, or its errors."""
    check_weight(w)
    check_search(scale_search)
    amax = check_finite(w)
    g = global_scale_of(amax, scale_search) if global_scale is None else _checked_global_scale(global_scale, tuple(w.shape[:-2]), w.device)
    return g, _checked_channel_weight(channel_weight, w.shape[-1], w.device) if scale_search == "activation" else None


def scale_of_rows(g: Tensor, n: int) -> Tensor:
    """``[E * n]``: the global scale of each row of matrices of ``n`` rows."""
    return g.reshape(-1, 1).expand(-1, n).reshape(-1)


def dequantize(qdata: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``[..., N, K]`` in ``dtype``: the product rounded to float32, then to ``dtype``.

    Args:
        qdata: uint8 ``[..., N, K/2]``.
        scale: float8_e4m3fn ``[..., N, K/16]``.
        global_scale: float32 with the leading shape (``[]`` or ``[E]``; ``[E, 1, 1]`` is accepted too).
    """
    g = global_scale.reshape(*qdata.shape[:-2], 1, 1, 1)
    values = e2m1.decode(e2m1.unpack(qdata)).unflatten(-1, (-1, GROUP))
    # e2m1 * e4m3 has six significant bits: exact. The one rounding is the product with the global scale.
    return ((values * scale.float().unsqueeze(-1)) * g).flatten(-2).to(dtype)


def check_weight(w: Tensor) -> None:
    """Raise unless ``w`` is a high-precision ``[..., N, K]`` with K a multiple of 16. Reads no values."""
    if w.dtype not in HIGH_PRECISION:
        raise DTypeError("NVFP4 is quantized from a high-precision weight", value=w.dtype, limit=list(HIGH_PRECISION), remedy="Cast it with .to(dtype).")
    if w.dim() < 2 or w.shape[-1] % GROUP:
        raise ShapeError(
            "NVFP4 needs a weight [..., N, K] with K a multiple of 16",
            value=tuple(w.shape),
            limit="dim >= 2 and K % 16 == 0",
            remedy="Pad K with zeros, as FP4Linear does.",
        )


def check_finite(w: Tensor) -> Tensor:
    """The largest magnitude of each matrix of ``w`` (shape: its leading dimensions, its dtype); NonFiniteError if there is NaN or Inf."""
    if w.device.type == "meta":
        raise DeviceError("a weight on the meta device has no values to quantize", value=tuple(w.shape), limit="a device with memory", remedy=_LOAD_FIRST)
    # Not w.abs().amax(): that writes a second copy of the weight.
    dims = tuple(range(-min(w.dim(), 2), 0))
    amax = torch.maximum(w.amax(dims), -w.amin(dims)) if w.numel() else w.new_zeros(w.shape[:-2])
    if not torch.isfinite(amax).all():
        raise NonFiniteError(
            "a weight holds NaN or Inf",
            value=f"{int((~torch.isfinite(w)).sum())} of {w.numel()} elements",
            limit="finite values",
            remedy="Repair or exclude this layer (ignore=[...]).",
        )
    return amax


def check_search(scale_search: str) -> None:
    """Raise ConfigError unless ``scale_search`` is one of :data:`SCALE_SEARCHES`."""
    if scale_search not in _TOP:
        raise ConfigError("unknown scale_search", value=repr(scale_search), limit=list(SCALE_SEARCHES), remedy="NVFP4Config describes them.")


def check_parts(qdata: Tensor, scale: Tensor, global_scale: Tensor) -> None:
    """Raise unless the three tensors can be one NVFP4 weight: dtypes, shapes, one device. Reads no values."""
    check_dtypes(qdata=(qdata, torch.uint8), scale=(scale, SCALE_DTYPE), global_scale=(global_scale, torch.float32))
    if qdata.dim() < 2 or (qdata.shape[-1] * 2) % GROUP or tuple(scale.shape) != (*qdata.shape[:-1], qdata.shape[-1] * 2 // GROUP):
        raise ShapeError(
            "NVFP4 qdata and scale do not belong together",
            value=f"qdata {tuple(qdata.shape)}, scale {tuple(scale.shape)}",
            limit="qdata [..., N, K/2], scale [..., N, K/16]",
            remedy="Take both from one quantize() or one checkpoint entry.",
        )
    check_global_scale(global_scale, tuple(qdata.shape[:-2]))
    check_one_device(qdata=qdata, scale=scale, global_scale=global_scale)


def check_dtypes(**parts: tuple[Tensor, torch.dtype]) -> None:
    """Raise unless each part of a weight has its dtype."""
    for name, (t, want) in parts.items():
        if t.dtype != want:
            raise DTypeError(
                f"NVFP4 {name} has the wrong dtype",
                value=t.dtype,
                limit=want,
                remedy="Reinterpret stored bytes with .view(dtype); a cast would change the bits.",
            )


def check_global_scale(global_scale: Tensor, lead: tuple[int, ...]) -> None:
    """Raise unless a stored global scale has one element per matrix of leading shape ``lead``."""
    if tuple(global_scale.shape) not in (lead, (*lead, 1, 1)):
        raise ShapeError(
            "NVFP4 global_scale does not fit", value=tuple(global_scale.shape), limit=f"{lead} or {(*lead, 1, 1)}", remedy="One float32 per matrix."
        )


def check_one_device(**parts: Tensor) -> None:
    """Raise unless all parts of a weight lie on one device."""
    if len({t.device for t in parts.values()}) > 1:
        raise DeviceError(
            "the parts of one NVFP4 weight lie on different devices",
            value=", ".join(f"{name} {t.device}" for name, t in parts.items()),
            limit="one device",
            remedy="Move the weight as a whole with .to(device).",
        )


# --- scale choice -----------------------------------------------------------------------------------------------


def _divide(blocks: Tensor, s: Tensor) -> Tensor:
    """blocks / s with a zero scale giving zeros (an all-zero block keeps scale byte 0).

    A true division: multiplying by the rounded reciprocal moves exact ties for 14 of the 126 scales.
    """
    return blocks / torch.where(s > 0, s, torch.ones_like(s)).unsqueeze(-1)


def to_code(s: Tensor) -> Tensor:
    """float32 >= 0 -> E4M3 code (uint8), saturating; a positive scale never becomes zero."""
    code = s.clamp(max=SCALE_MAX).to(SCALE_DTYPE).view(torch.uint8)
    return torch.where(s > 0, code.clamp(_SCALE_MIN_BYTE, SCALE_MAX_BYTE), torch.zeros_like(code))


def choose_scale_codes(blocks: Tensor, search: str, weight: Tensor | None) -> Tensor:
    """E4M3 codes (uint8 ``[R, B]``) for blocks ``[R, B, 16]`` already divided by the global scale."""
    blocks = blocks.abs()
    amax = blocks.amax(-1)
    base = to_code(amax / torch.full_like(amax, e2m1.MAX))  # by a tensor: see global_scale_of
    if search == "amax":
        return base
    if search == "four_over_six":
        candidates = [base, to_code(amax / 4.0)]
    else:
        wide = base.to(torch.int16)
        candidates = [torch.where(amax > 0, (wide + d).clamp(_SCALE_MIN_BYTE, SCALE_MAX_BYTE), wide).to(torch.uint8) for d in _SWEEP if d]
    w = None if weight is None else weight.unflatten(-1, (-1, GROUP))
    best, best_error = base, _error(blocks, base, w)
    for code in candidates:
        error = _error(blocks, code, w)
        better = error < best_error
        best, best_error = torch.where(better, code, best), torch.where(better, error, best_error)
    return best


def _error(blocks: Tensor, code: Tensor, weight: Tensor | None) -> Tensor:
    """The squared error of each block of magnitudes."""
    s = code.view(SCALE_DTYPE).float()
    d = torch.addcmul(blocks, e2m1.round_magnitude_(_divide(blocks, s)), s.unsqueeze(-1), value=-1.0).square_()
    d = d if weight is None else d.mul_(weight)
    # Pairwise, in one order on every device, so that CPU and CUDA choose the same scales.
    for half in (8, 4, 2, 1):
        d = d[..., :half] + d[..., half:]
    return d.squeeze(-1)


# --- checks -----------------------------------------------------------------------------------------------------


def _checked_global_scale(g: Tensor, lead: tuple[int, ...], device: torch.device) -> Tensor:
    if g.device != device:
        raise DeviceError("global_scale lies on another device than the weight", value=g.device, limit=device, remedy="Move it with .to(weight.device).")
    # One matrix also takes the [1] that checkpoints store; experts also the [E, 1, 1] that broadcasts.
    accepted = (lead, (*lead, 1, 1)) if lead else ((), (1,), (1, 1))
    if tuple(g.shape) not in accepted:
        raise ShapeError(
            "global_scale does not fit the weight's leading shape",
            value=tuple(g.shape),
            limit=" or ".join(str(tuple(s)) for s in accepted),
            remedy="One float32 per matrix.",
        )
    g = g.to(torch.float32).reshape(lead)
    if not bool(((g > 0) & torch.isfinite(g)).all()):
        raise NonFiniteError(
            "global_scale must be positive and finite",
            value=g.flatten()[:4].tolist(),
            limit="> 0 in float32",
            remedy="It multiplies: amax / 2688. A checkpoint that divides by it stores the reciprocal.",
        )
    return g


def _checked_channel_weight(weight: Tensor | None, k: int, device: torch.device) -> Tensor:
    if weight is None:
        raise ConfigError(
            'scale_search="activation" needs channel_weight',
            value="None",
            limit=f"[{k}] float32, E[x^2] per input channel",
            remedy="quantize_model measures it from calibration batches.",
        )
    weight = weight.to(device=device, dtype=torch.float32)
    if tuple(weight.shape) != (k,):
        raise ShapeError("channel_weight does not fit K", value=tuple(weight.shape), limit=f"({k},)", remedy="It has one E[x^2] per input channel.")
    if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        bad = int((~(torch.isfinite(weight) & (weight >= 0))).sum())
        raise NonFiniteError(
            "channel_weight must be finite and >= 0", value=f"{bad} bad of {k} entries", limit="finite, >= 0", remedy="Check the calibration data."
        )
    # A channel that calibration never excited still has to be representable.
    return weight.clamp_min(weight.mean() * 1e-4 + _TINY)


def row_chunks(rows: int, k: int) -> Iterator[slice]:
    """Slices of rows, of about as many weights as are handled at once."""
    step = max(1, _CHUNK // max(k, 1))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def scale_values(codes: Tensor, g: Tensor) -> Tensor:
    """float32: what a code of one unit is worth in blocks with these E4M3 ``codes`` (uint8)."""
    return codes.view(SCALE_DTYPE).float() * g


def to_grid(x: Tensor, scale: Tensor) -> Tensor:
    """``x`` rounded to E2M1 times ``scale``: the nearest multiples of ``scale``; zeros where the scale is zero."""
    return e2m1.round_to_grid(x / torch.where(scale > 0, scale, torch.ones_like(scale))) * scale
