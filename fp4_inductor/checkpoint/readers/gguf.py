"""GGUF tensors of the types NVFP4 (40) and MXFP4 (39), as they lie in the blocks of ggml.

NVFP4: 64 weights in 36 bytes, four E4M3 scales, then 32 bytes of codes; in each run of 16 weights the low nibbles of 8 bytes are
the first 8, the high nibbles the last 8. The global scale is a tensor beside it, ``X.scale``, one number or one an expert.
MXFP4: 32 weights in 17 bytes, an E8M0 exponent, then 16 bytes of codes, low nibbles first. ggml doubles the E2M1 values and halves
the scale: the same numbers as here. Source: gguf-py 0.19 (constants.py, quants.py) and llama.cpp's converters.

Which tensor is which of a model's is :mod:`fp4_inductor.integrations.pretrained.gguf`'s to say: it needs transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...formats import e2m1, mxfp4, nvfp4
from ..gguf_file import GGUFTensor
from ..safetensors_file import Entry
from ..shards import Shards
from .mx import decode as decode_mx
from .weight import Found, StoredDense, StoredWeight, unsupported

METHOD = "gguf"
# ggml type -> (weights, bytes, bytes of scales at the front) of a block
TYPES = {"NVFP4": (64, 36, 4), "MXFP4": (mxfp4.GROUP, 17, 1)}
_RUN = {"NVFP4": nvfp4.GROUP, "MXFP4": mxfp4.GROUP}  # whose halves are the low and the high nibbles


def check(config: Mapping[str, Any]) -> None:
    if not isinstance(config.get("found"), Found):
        raise unsupported("GGUF: quant_method in config.json", METHOD, "a .gguf file, named to load_pretrained")


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    """What was found when the file was opened."""
    return config["found"]


@dataclass(frozen=True)
class Pieces:
    """One weight of a model: ``weights`` has one tensor, or gate and up, whose rows are joined; ``scales``: the global scales beside them."""

    path: Path
    kind: str
    weights: tuple[GGUFTensor, ...]
    scales: tuple[GGUFTensor, ...] = ()
    interleaved: bool = False

    def stored(self, name: str, *, rows: Tensor | None = None, transposed: bool = False, input_scale: GGUFTensor | None = None) -> StoredWeight:
        """``rows``: row i of the model's weight is row ``rows[i]`` of the file's."""
        weights, bytes_, _ = TYPES[self.kind]
        *lead, n, k = self.weights[0].shape
        n *= len(self.weights)
        if any(t.shape != self.weights[0].shape for t in self.weights):
            raise CheckpointError(f"{name}: gate and up differ", value=[t.shape for t in self.weights], limit="one shape", remedy="Download the file again.")
        parts = [Entry(t.name, torch.uint8, (*t.shape[:-1], k // weights * bytes_), self.path, t.start, t.end) for t in self.weights]
        of_input = None if input_scale is None else _floats(self.path, input_scale, (1,))
        parts += [_floats(self.path, t, (1,), tuple(lead)) for t in self.scales]
        decode = _Decode(self.kind, len(self.weights), rows, self.interleaved)
        return StoredWeight(name, (*lead, k, n) if transposed else (*lead, n, k), tuple(parts), decode, transposed, of_input, format=self.kind.lower())


def stored_bias(name: str, path: Path, pieces: Sequence[GGUFTensor], interleaved: bool) -> StoredDense:
    """Biases ``[E, N]`` of experts, those of gate and up joined."""
    e, n = pieces[0].shape if len(pieces[0].shape) == 2 else (0, 0)
    parts = tuple(_floats(path, t, (e, n)) for t in pieces)
    return StoredDense(name, (e, n * len(pieces)), parts, lambda *read: join(read, interleaved, -1))


def join(pieces: Sequence[Tensor], interleaved: bool, dim: int) -> Tensor:
    """One after the other, or first, second, first, second, ... along ``dim`` (negative)."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.stack(tuple(pieces), dim).flatten(dim - 1, dim) if interleaved else torch.cat(tuple(pieces), dim)


def _floats(path: Path, t: GGUFTensor, *shapes: tuple[int, ...]) -> Entry:
    if t.kind or t.shape not in shapes:  # type 0 is F32
        raise unsupported(f"GGUF: {t.name}", f"type {t.kind} {t.shape}", f"F32 {' or '.join(str(s) for s in shapes)}")
    return Entry(t.name, torch.float32, t.shape, path, t.start, t.end)


@dataclass(frozen=True)
class _Decode:
    kind: str
    weights: int
    rows: Tensor | None
    interleaved: bool

    def __call__(self, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor] | Tensor:
        split = [self._split(raw) for raw in parts[: self.weights]]
        qdata, scale = (join(pieces, self.interleaved, -2) for pieces in zip(*split, strict=True))
        if self.rows is not None:
            qdata, scale = qdata[self.rows], scale[self.rows]
        if self.kind == "MXFP4":
            return decode_mx(qdata, scale)
        lead = qdata.shape[:-2]
        wholes = [t.reshape(-1).expand(lead).contiguous() if lead else t.reshape(()) for t in parts[self.weights :]] or [torch.ones(lead)]
        if all(torch.equal(wholes[0], other) for other in wholes[1:]):
            return qdata, scale.view(nvfp4.SCALE_DTYPE), wholes[0]
        dense = [nvfp4.dequantize(q, s.view(nvfp4.SCALE_DTYPE), w, torch.float32) for (q, s), w in zip(split, wholes, strict=True)]
        return join(dense, self.interleaved, -2)

    def _split(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks -> (codes packed as here, scale bytes)."""
        _, bytes_, front = TYPES[self.kind]
        blocks = raw.unflatten(-1, (-1, bytes_))
        pairs = blocks[..., front:].unflatten(-1, (-1, _RUN[self.kind] // 2))
        codes = torch.cat((pairs & 15, pairs >> 4), -1).flatten(-3)
        return e2m1.pack(codes), blocks[..., :front].flatten(-2).contiguous()
