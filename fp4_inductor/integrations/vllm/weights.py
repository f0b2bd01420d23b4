"""The weights of our own checkpoints as vLLM's models load them: ModelOpt's tensors, under the names of the original checkpoint.

``save`` and ``save_pretrained`` keep the names and shapes that a model of Transformers has in memory: experts of a layer are one tensor,
names are Transformers' own. vLLM's models know the names that the published checkpoints have. Transformers has the rules from one
to the other, and here they are run backwards on each part of a weight (codes, metadata, scales), all of which have the rows of the
dense weight in its last dimension but one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.directory import open_checkpoint
from ...checkpoint.manifest import FILE as NATIVE
from ...checkpoint.readers import Found, StoredWeight, modelopt, native
from ...checkpoint.readers.weight import StoredFP8
from ...checkpoint.safetensors_file import Entry, Reader
from ...checkpoint.shards import Shards, open_shards
from ...errors import CheckpointError, UnsupportedOpError
from . import gpt_oss
from .linear import META
from .preflight import check_scales

_FILES = ("*.safetensors", "*.json")
_WRITE = "Write the model for servers: fp4-inductor quantize MODEL OUT --format modelopt, or fp4_inductor.export_pretrained."
_STACKED = ("gate_up_proj", "down_proj")


@dataclass
class Stored:
    """What is in a folder, proved: nothing is read yet.

    Args:
        packed: name of the dense weight in a model of Transformers -> the quantized weight.
        rest: the other tensors by the same names.
        crc32: of each tensor, by its name on disk, where the format has them.
        cache: scales of a KV cache in FP8, by the names of vLLM's model (gpt-oss).
        formats: name of a layer in the original checkpoint -> ``"nvfp4"``, ``"sparse24_nvfp4"`` or ``"fp8"``.
    """

    folder: Path
    hf_config: Any
    packed: dict[str, StoredWeight]
    rest: dict[str, Entry]
    crc32: dict[str, int]
    cache: dict[str, Entry] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)


def on_this_machine(folder: Path, revision: str | None) -> Path:
    """``folder``, or where the checkpoint of this hub id is kept; it is fetched now, for its headers say which layers are packed."""
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(folder), revision=revision, allow_patterns=list(_FILES)))


def look_into(folder: Path, hf_config: Any, source: Mapping[str, Any] | None = None) -> Stored:
    """Prove the headers of a folder of ours, and that its weights can be given original names.

    Args:
        source: the ``quantization_config`` of a folder in ModelOpt's layout instead.

    Raises:
        CheckpointError: it is damaged, or it is of another architecture. UnsupportedOpError: weights that have no form in vLLM.
    """
    if source is not None and str(source.get("quant_method", "")).startswith(modelopt.METHOD):
        stored = _in_shards(folder, hf_config, modelopt.find, source)
    else:
        stored = _native(folder, hf_config) if (folder / NATIVE).exists() else _in_shards(folder, hf_config, native.find, {})
    if not stored.packed:
        raise CheckpointError("no quantized weight was found", value=str(folder), limit="weights in FP4", remedy="Download the checkpoint again.")
    check_scales(list(stored.packed.values()))
    dense = _dense(hf_config)
    shapes = {name: tuple(p.shape) for name, p in dense.named_parameters(remove_duplicate=False)}
    for name, weight in stored.packed.items():
        want = shapes.get(name)
        if want is None:
            raise CheckpointError(f"{name} is not in {type(dense).__name__}", value=name, limit="a parameter of the model", remedy="Correct config.json.")
        turned = (*want[:-2], want[-1], want[-2])
        if tuple(weight.shape) not in (want, turned):
            raise UnsupportedOpError(
                f"{name} is padded to whole blocks, which vLLM cannot shard", value=want, limit=f"{tuple(weight.shape)}",
                remedy="Leave this layer out when quantizing: ignore=[...].",
            )  # fmt: skip
    for name, weight in stored.packed.items():
        meta = torch.empty(*weight.shape[:-1], 1, device="meta")
        for original in _original(dense, name, [meta]):
            stored.formats[original.removesuffix(".weight")] = weight.format
    if gpt_oss.is_gpt_oss(hf_config):
        gpt_oss.check_head(stored.formats)
    known = dense.state_dict().keys() | shapes.keys()
    stored.rest = {name: entry for name, entry in stored.rest.items() if name in known or name.rpartition(".")[2] in ("gate_up_proj_bias", "down_proj_bias")}
    return stored


def _native(folder: Path, hf_config: Any) -> Stored:
    checkpoint = open_checkpoint(folder)
    manifest = checkpoint.manifest
    if manifest.tensors:
        raise UnsupportedOpError(
            "weights that are tensors in modules of the model's own have no form in vLLM", value=sorted(manifest.tensors)[:4], limit="layers", remedy=_WRITE
        )
    if strange := sorted(name for name, e in manifest.experts.items() if e.dense or e.identity):
        raise UnsupportedOpError(f"{strange[0]}: experts of this kind have no form in vLLM", value=strange[:4], limit="routed experts", remedy=_WRITE)
    entries = {name: e for name, e in checkpoint.entries.items() if name not in manifest.aliases and name not in manifest.derived}
    crc32 = {name: crc for file in manifest.files.values() for name, crc in file.crc32.items()}
    found = native.find(Shards(folder, entries, {}), {})
    rest = {_bias(name, found.weights): e for name, e in entries.items() if name not in found.used}
    return Stored(folder, hf_config, found.weights, rest, crc32)


def _in_shards(folder: Path, hf_config: Any, find: Callable[..., Found], source: Mapping[str, Any]) -> Stored:
    shards = open_shards(folder)
    found = find(shards, source)
    rest = {_bias(name, found.weights): e for name, e in shards.entries.items() if name not in found.used and name not in found.ignored}
    cache = {new: shards.entries[old] for old, new in gpt_oss.scales_of_cache(found.ignored).items()}
    return Stored(folder, hf_config, found.weights, rest, {}, cache)


def _bias(name: str, weights: Mapping[str, StoredWeight]) -> str:
    """``experts.down_proj.bias`` in memory is ``experts.down_proj_bias`` in a dense model."""
    owner, _, last = name.rpartition(".")
    return f"{owner}_bias" if last == "bias" and owner in weights else name


def _dense(hf_config: Any) -> Any:
    """The model on the meta device that Transformers builds from this config.json."""
    import transformers

    config = copy.deepcopy(hf_config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    name = (getattr(config, "architectures", None) or [""])[0]
    made = getattr(transformers, name, None)
    if made is None:
        raise UnsupportedOpError("the names of this architecture's weights are not known", value=name, limit="model classes of Transformers", remedy=_WRITE)
    with torch.device("meta"):
        return made._from_config(config, dtype=torch.bfloat16)


def _original(dense: Any, name: str, tensors: list[Tensor]) -> dict[str, list[Tensor]]:
    """Parts of the weight ``name`` (each ``[..., N, something]``) -> parts by the names of the original checkpoint."""
    from ..pretrained.export import original_names

    found = [_apart(original_names(dense, {name: t})) for t in tensors]
    return {key: [part[key] for part in found] for key in found[0]}


def _apart(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that Transformers leaves stacked ``[E, N, K]`` come apart, as published checkpoints have them."""
    out: dict[str, Tensor] = {}
    for name, t in found.items():
        owner, _, last = name.rpartition(".")
        if t.dim() != 3 or not owner.endswith("experts") or last not in _STACKED:
            out[name] = t
            continue
        for e in range(t.shape[0]):
            halves = {"down_proj": t[e]} if last == "down_proj" else dict(zip(("gate_proj", "up_proj"), t[e].chunk(2), strict=True))
            out |= {f"{owner}.{e}.{part}.weight": half for part, half in halves.items()}
    return out


def stream(stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole checkpoint, weight by weight."""
    dense = _dense(stored.hf_config)
    fused = gpt_oss.is_gpt_oss(stored.hf_config)
    with Reader() as reader:

        def read(entry: Entry) -> Tensor:
            return reader.read(entry, stored.crc32.get(entry.name))

        for name, weight in stored.packed.items():
            tensors = weight.decode(*(read(part) for part in weight.parts))
            if isinstance(weight, StoredFP8):
                qdata, scale = tensors
                for original, (codes, rows) in _original(dense, name, [qdata, scale.reshape(-1, 1)]).items():
                    yield from ((original, codes), (f"{original}_scale", rows))
                continue
            *codes, scale, g = tensors
            if fused and weight.shape[:-2]:
                yield from gpt_oss.tensors(name, codes, scale, g)
                continue
            rows = g.reshape(*g.shape, 1, 1).expand(*scale.shape[:-1], 1)  # one number for each row travels through the rules
            for original, (*kept, block, whole) in _original(dense, name, [*codes, scale, rows]).items():
                stem = original.removesuffix("weight")
                yield original, kept[0]
                if len(kept) > 1:
                    yield f"{stem}{META}", kept[1]
                yield f"{stem}weight_scale", block
                yield f"{stem}weight_scale_2", whole.reshape(-1)[0].clone()
        for name, entry in stored.cache.items():
            yield name, read(entry)
        for name, entry in stored.rest.items():
            for original, (t,) in _original(dense, name, [read(entry)]).items():
                yield original, t
