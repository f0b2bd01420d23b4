"""What every reader gives: quantized weights that are described, proved in shape and dtype, and not read yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import CheckpointError, NonFiniteError, SparsityError
from ...formats import fp8, nvfp4
from ...formats.packing import pack_experts, pack_linear
from ...formats.reciprocal import reciprocal_scale
from ...tensors import NVFP4Tensor
from ..safetensors_file import Entry, Reader
from ..shards import Shards

Decode = Callable[..., Any]  # of what each class below says
_E4M3_NAN = 0x7F
_AGAIN = "Download the checkpoint again, or quantize the model again."


@dataclass(frozen=True)
class StoredWeight:
    """One quantized weight on disk.

    Args:
        name: what its dense form would be called in this checkpoint, e.g. ``"model.layers.0.mlp.up_proj.weight"``.
        shape: of the dense form, ``[..., N, K]``, or ``[..., K, N]`` if ``transposed``.
        parts: the tensors it is made of, in the order ``decode`` takes them.
        decode: raw tensors -> ``(qdata, scale, global_scale)`` as :class:`NVFP4Tensor` takes them; a single dense tensor
            where the format has a value that NVFP4 cannot hold.
        transposed: the model keeps this weight as ``[..., K, N]``.
        input_scale: the activation scale that came with it (W4A4 checkpoints), and whether it divides.
        straight: ``decode`` computes nothing, so that its parts can be read on the device where they stay.
        divides: the global scale that ``decode`` gives divides.
        format: the number format on disk, ``"nvfp4"``, ``"mxfp4"`` or ``"fp8"``.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Entry, ...]
    decode: Decode
    transposed: bool = False
    input_scale: Entry | None = None
    input_scale_divides: bool = False
    straight: bool = False
    divides: bool = False
    format: str = nvfp4.NAME
    packed: ClassVar[bool] = True  # it goes into a module of its own, not into a Parameter of the model

    @property
    def bytes(self) -> int:
        return sum(part.end - part.start for part in self.parts)

    def like_meta(self, dtype: torch.dtype) -> NVFP4Tensor:
        """A stand-in without memory: its shape follows every operation as the weight's own would."""
        *lead, n, k = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape
        qdata = torch.empty(*lead, n, k // 2, dtype=torch.uint8, device="meta")
        scale = torch.empty(*lead, n, k // nvfp4.GROUP, dtype=nvfp4.SCALE_DTYPE, device="meta")
        return NVFP4Tensor(qdata, scale, torch.empty(lead, dtype=torch.float32, device="meta"), dtype, self.transposed)

    def read(self, reader: Reader, dtype: torch.dtype, device: torch.device | None = None, *, as_stored: bool = False) -> Tensor:
        """The weight on the CPU, or on ``device`` if it is ``straight``, bit for bit; an :class:`NVFP4Tensor`, or dense where NVFP4 cannot hold it.

        Args:
            as_stored: leave a global scale that ``divides`` as it is. Whoever stacks such weights inverts all scales at once (:func:`multiplying`).

        Raises:
            CheckpointError: a scale that is NaN, negative, infinite or zero where it must not be.
        """
        parts = self.decode(*(reader.read(part, device=device if self.straight else None) for part in self.parts))
        if isinstance(parts, Tensor):
            return parts.mT.to(dtype) if self.transposed else parts.to(dtype)
        qdata, scale, global_scale = parts
        qdata, scale, global_scale = self._packed(qdata, scale, global_scale, divides=self.divides and not as_stored)
        return NVFP4Tensor(qdata, scale, global_scale, dtype, self.transposed)

    def read_input_scale(self, reader: Reader) -> Tensor | None:
        """float32, multiplying, in the shape of the leading dimensions; None if there is none."""
        if self.input_scale is None:
            return None
        stored = reader.read(self.input_scale).reshape(self.shape[:-2] if self.input_scale.shape not in ((), (1,)) else ())
        if not bool((torch.isfinite(stored) & (stored > 0)).all()):
            raise CheckpointError(
                f"{self.input_scale.name} must be finite and positive", value=stored.flatten()[:4].tolist(), limit="finite and > 0", remedy=_AGAIN
            )
        return stored.reciprocal() if self.input_scale_divides else stored

    def _packed(self, codes: Tensor, scale: Tensor, global_scale: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """The parts in the order in which the ops take them, their values proved."""
        pack = pack_linear if codes.dim() == 2 else pack_experts
        try:
            return pack(codes, scale, global_scale, name=self.name, **options).weight
        except (NonFiniteError, SparsityError) as error:
            raise CheckpointError(error.what, value=error.value, limit=error.limit, remedy=_AGAIN) from error


def multiplying(t: NVFP4Tensor, name: str) -> NVFP4Tensor:
    """``t``, whose global scales divide, with scales that multiply. ``name``: what an error calls it."""
    g = reciprocal_scale(t.global_scale)
    bad = g[~(torch.isfinite(g) & (g > 0))]
    if bad.numel():
        raise CheckpointError(f"{name} has a global scale without a reciprocal", value=bad[:4].tolist(), limit="finite and > 0", remedy=_AGAIN)
    return t.with_parts((t.qdata, t.scale, g))


class FP8Weight(NamedTuple):
    """What :class:`StoredFP8` reads: ``qdata`` float8_e4m3fn ``[N, K]``, ``scale`` float32 ``[N]``."""

    qdata: Tensor
    scale: Tensor


@dataclass(frozen=True)
class StoredFP8(StoredWeight):
    """An E4M3 weight ``[N, K]`` with one float32 scale, or one per row; ``decode`` gives ``(qdata, scale)``. For linear layers only."""

    format: str = fp8.NAME

    def like_meta(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return torch.empty(self.shape, dtype=fp8.DTYPE, device="meta")

    def read(  # type: ignore[override]
        self, reader: Reader, dtype: torch.dtype, device: torch.device | None = None, *, as_stored: bool = False
    ) -> FP8Weight:
        qdata, scale = self.decode(*(reader.read(part) for part in self.parts))
        if bool(((qdata.view(torch.uint8) & _E4M3_NAN) == _E4M3_NAN).any()):
            raise CheckpointError(f"{self.name} holds NaN", value="0x7f or 0xff", limit="finite E4M3", remedy=_AGAIN)
        bad = scale[~(torch.isfinite(scale) & (scale > 0))]
        if bad.numel():
            raise CheckpointError(f"{self.name} has a scale that is not finite and positive", value=bad[:4].tolist(), limit="> 0", remedy=_AGAIN)
        return FP8Weight(qdata, scale.reshape(-1).expand(qdata.shape[0]).contiguous())


@dataclass(frozen=True)
class StoredDense(StoredWeight):
    """Values in high precision that are stored in several pieces (GGUF's expert biases); ``decode`` gives one tensor of ``shape``."""

    packed: ClassVar[bool] = False

    def like_meta(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        return torch.empty(self.shape, dtype=dtype, device="meta")


@dataclass
class Found:
    """What a reader found. ``weights``: by dense name. ``used``: names on disk that belong to them.

    ``ignored``: names on disk that mean nothing to a forward pass here (scales of a quantized KV cache), and why.
    ``notes``: what else the report should say.
    """

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, weight: StoredWeight, also: Iterable[str] = ()) -> None:
        if weight.name in self.weights:
            raise CheckpointError(f"{weight.name} is stored twice, in two layouts", value=[p.name for p in weight.parts], limit="one", remedy=_AGAIN)
        self.weights[weight.name] = weight
        self.used |= {part.name for part in weight.parts} | set(also)
        if weight.input_scale is not None:
            self.used.add(weight.input_scale.name)


class Format(Protocol):
    """One on-disk format: a module of this folder with these names, listed in ``readers.FORMATS``."""

    METHOD: str  # ``quant_method`` in config.json

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise CheckpointError if this variant of the format cannot be read. ``config``: ``quantization_config``."""

    def find(self, shards: Shards, config: Mapping[str, Any]) -> Found:
        """Describe every quantized weight; reads no tensor data."""


def need(entry: Entry | None, name: str, shape: tuple[int, ...] | tuple[tuple[int, ...], ...], dtype: torch.dtype | tuple[torch.dtype, ...]) -> Entry:
    """``entry``, if it is there with one of these shapes and dtypes."""
    shapes = shape if shape and isinstance(shape[0], tuple) else (shape,)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    limit = f"{' or '.join(map(str, dtypes))} {' or '.join(str(tuple(s)) for s in shapes)}"
    if entry is None:
        raise CheckpointError(f"{name} is missing", value="no such tensor", limit=limit, remedy=_AGAIN)
    if entry.shape not in shapes or entry.dtype not in dtypes:
        raise CheckpointError(f"{name} has the wrong shape or dtype", value=f"{entry.dtype} {entry.shape}", limit=limit, remedy=_AGAIN)
    return entry


def packed_k(entry: Entry, dim: int = -1, group: int = nvfp4.GROUP) -> int:
    """K of a uint8 tensor that packs two codes a byte along ``dim``."""
    if len(entry.shape) < 2 or entry.dtype != torch.uint8 or (entry.shape[dim] * 2) % group:
        raise CheckpointError(
            f"{entry.name} is no packed matrix of whole blocks",
            value=f"{entry.dtype} {entry.shape}",
            limit=f"uint8, two codes a byte, K a multiple of {group}",
            remedy="This layout is not one that the format describes: " + _AGAIN[0].lower() + _AGAIN[1:],
        )
    return entry.shape[dim] * 2


def check_groups(config: Mapping[str, Any], group_sizes: Mapping[str, int], method: str) -> None:
    """Every ``config_groups`` entry is FP4 with a known format and group size. ``group_sizes``: by format; "" where the group names none."""
    groups = config.get("config_groups", {})
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"{method}: config_groups is not valid", value=repr(groups)[:200], limit="an object", remedy=_AGAIN)
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"{method}: config_groups[{name!r}] has no weights", value=repr(group)[:200], limit="an object", remedy=_AGAIN)
        known = group.get("format") or config.get("format") or ""
        if known not in group_sizes and known != "mixed-precision":
            raise unsupported(f"{method}: weight format", known, list(group_sizes))
        what = (weights.get("num_bits", 4), weights.get("type", "float"))
        if what != (4, "float"):
            raise unsupported(f"{method}: weights of group {name!r}", f"{what[0]}-bit {what[1]}", "4-bit float")
        limit = {group_sizes[known]} if known in group_sizes else set(group_sizes.values())
        if weights.get("group_size", min(limit)) not in limit:
            raise unsupported(f"{method}: group_size of group {name!r}", weights.get("group_size"), sorted(limit))


def unsupported(what: str, value: object, limit: object) -> CheckpointError:
    """The error for a variant of a known format that this package does not read."""
    remedy = "Load it with the library that wrote it, or quantize the original model with fp4_inductor.quantize_model."
    return CheckpointError(f"{what} is not one that can be read", value="nothing" if value is None else value, limit=limit, remedy=remedy)
