"""GGUF with NVFP4 tensors (type 40): 64 weights in 36 bytes, four E4M3 scales, then 32 bytes of codes; the global scale in a tensor beside it.

In each run of 16 weights the low nibbles of 8 bytes are the first 8, the high nibbles the last 8. ggml doubles the E2M1
values and halves the scale: the same numbers as here. Everything that is no NVFP4 (norms, and embeddings in other types)
is decoded by the gguf package. Source: gguf-py 0.19 (constants.py, quants.py) and llama.cpp's converter for the names and
the order of llama's query and key rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...formats import e2m1, nvfp4
from ..safetensors_file import Entry
from ..shards import Shards
from .weight import Found, StoredWeight, need, unsupported

METHOD = "gguf"
_TYPE = "NVFP4"
_BLOCK, _BLOCK_BYTES, _SCALES = 64, 36, 4
# Architectures whose linear layers llama.cpp keeps as they are, but for the order of these rows.
_ROTATED = {"llama": ("self_attn.q_proj.weight", "self_attn.k_proj.weight"), "qwen2": (), "qwen3": ()}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALE = ".scale"
_REMEDY = "Download the file again, or convert the original model."


def check(config: Mapping[str, Any]) -> None:
    """:func:`open_gguf` has looked at the file."""


def open_gguf(path: Path, names: Iterable[str]) -> tuple[Shards, dict[str, Tensor]]:
    """The tensors of a GGUF file under the names of a model.

    Args:
        path: the file.
        names: the model's state_dict names.

    Returns:
        ``(NVFP4 tensors and their scales, everything else as dense tensors)``.

    Raises:
        CheckpointError: no GGUF file, damaged, of an architecture whose layout is not known, or tensors the model has not.
    """
    try:
        import gguf

        file = gguf.GGUFReader(path)
        arch = str(file.fields["general.architecture"].contents())
        blocks = int(file.fields[f"{arch}.block_count"].contents())
        tensors = {t.name: t for t in file.tensors}
    except ImportError as error:
        raise CheckpointError("reading GGUF needs the gguf package", value=str(error), limit="gguf >= 0.17", remedy="Run pip install gguf.") from error
    except Exception as error:  # gguf-py trusts its input: whatever it meets in a damaged file
        raise CheckpointError(
            f"{path.name} is no GGUF file that can be read", value=f"{type(error).__name__}: {error}", limit="GGUF 2 or 3", remedy=_REMEDY
        ) from error
    if arch not in _ROTATED:
        raise unsupported(f"GGUF: architecture of {path.name}", arch, sorted(_ROTATED))
    table = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), blocks)
    size = path.stat().st_size
    entries: dict[str, Entry] = {}
    dense: dict[str, Tensor] = {}
    left = dict(tensors)
    for name in names:
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        t = left.pop(stored, None) if stored else None
        if t is None:
            continue
        shape = tuple(int(n) for n in reversed(t.shape))
        start, end = int(t.data_offset), int(t.data_offset) + int(t.n_bytes)
        if end > size:
            raise CheckpointError(f"{path.name}: {t.name} is truncated", value=size - start, limit=f"{end - start} bytes", remedy=_REMEDY)
        kind = t.tensor_type.name
        if kind == _TYPE:
            entries[name] = Entry(name, torch.uint8, (shape[0], shape[1] // _BLOCK * _BLOCK_BYTES), path, start, end)
            beside = left.pop(t.name.removesuffix(".weight") + _SCALE, None)
            if beside is not None:
                at = int(beside.data_offset)
                entries[name + _SCALE] = Entry(name + _SCALE, torch.float32, (), path, at, at + 4)
                if beside.tensor_type.name != "F32" or int(beside.n_elements) != 1 or at + 4 > size:
                    raise unsupported(f"GGUF: {beside.name}", f"{beside.tensor_type.name} {beside.shape}", "one F32")
        else:
            values = torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy())
            dense[name] = _original_rows(values.reshape(shape).to(_PLAIN.get(kind, torch.float32)), name, arch, file)
    if left:
        odd = [n for n in left if not n.startswith("rope_freqs")]
        if odd:
            raise CheckpointError(f"{path.name} has tensors that the model has not", value=", ".join(odd[:20]), limit="none", remedy=_REMEDY)
    heads = {part: str(int(file.fields[f"{arch}.attention.{key}"].contents())) for part, key in (("q", "head_count"), ("k", "head_count_kv"))}
    return Shards(path.parent, entries, {"architecture": arch, **heads}), dense


def find(shards: Shards, config: Mapping[str, Any]) -> Found:
    found = Found()
    for name, entry in shards.entries.items():
        if name.endswith(_SCALE):
            continue
        n, row = entry.shape
        whole = shards.entries.get(name + _SCALE)
        parts = (entry,) if whole is None else (entry, need(whole, whole.name, (), torch.float32))
        heads = _heads(name, shards.metadata)
        found.add(StoredWeight(name, (n, row // _BLOCK_BYTES * _BLOCK), parts, _Decode(heads)))
    return found


def _heads(name: str, metadata: Mapping[str, str]) -> int | None:
    """Number of heads whose rows llama.cpp reordered in this weight, or None."""
    if not name.endswith(_ROTATED[metadata["architecture"]] or ("\0",)):
        return None
    return int(metadata["q" if "q_proj" in name else "k"])


def _original_rows(t: Tensor, name: str, arch: str, file: Any) -> Tensor:
    if not name.endswith(_ROTATED[arch] or ("\0",)):
        return t
    key = "head_count" if "q_proj" in name else "head_count_kv"
    return t[original_rows(t.shape[0], int(file.fields[f"{arch}.attention.{key}"].contents()))]


def original_rows(n: int, heads: int) -> Tensor:
    """Row i of the model's weight is row ``original_rows(n, heads)[i]`` of llama.cpp's, which pairs the two halves of each head."""
    return torch.arange(n).view(heads, n // heads // 2, 2).transpose(1, 2).reshape(-1)


class _Decode:
    def __init__(self, heads: int | None):
        self.heads = heads

    def __call__(self, raw: Tensor, whole: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        n = raw.shape[0]
        blocks = raw.view(n, -1, _BLOCK_BYTES)
        scale = blocks[..., :_SCALES].reshape(n, -1).contiguous()
        pairs = blocks[..., _SCALES:].reshape(n, -1, nvfp4.GROUP // 2)
        codes = torch.cat((pairs & 15, pairs >> 4), -1)
        qdata = e2m1.pack(codes.reshape(n, -1))
        if self.heads is not None:
            rows = original_rows(n, self.heads)
            qdata, scale = qdata[rows], scale[rows]
        return qdata, scale.view(nvfp4.SCALE_DTYPE), torch.ones(()) if whole is None else whole
