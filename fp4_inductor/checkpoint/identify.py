"""Which format a checkpoint on this machine is in, told by its small files: no weight is read and no model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import manifest as mf
from .gguf_file import begins_as_gguf
from .readers import compressed_tensors, format_of, modelopt, native
from .shards import CONFIG, files_of, read_json

HF_QUANT_CONFIG = "hf_quant_config.json"
NATIVE, TRANSFORMERS, GGUF, DENSE = "native", "transformers", "gguf", "dense"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is.

    Args:
        format: ``"native"`` (:func:`fp4_inductor.save`), ``"transformers"`` (``save_pretrained`` of a model quantized here),
            ``"modelopt"``, ``"compressed-tensors"``, ``"mxfp4"`` (gpt-oss), ``"torchao"``, ``"gguf"``, or ``"dense"``: not quantized.
        detail: the variant, and who wrote it, as far as it says so.
        architecture: name of the model's class, or of a GGUF architecture; empty if nothing says it.
        source: ``quantization_config``, for the reader of this format.
    """

    format: str
    detail: str = ""
    architecture: str = ""
    source: dict[str, Any] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return self.format != DENSE


def identify(path: Path) -> Identity:
    """The format of a folder, or of a ``.gguf`` file.

    Raises:
        CheckpointError: no such path, no weights there, a damaged config.json, a quantization that no reader here knows.
    """
    if path.is_file() and path.suffix == ".gguf" and begins_as_gguf(path):
        return Identity(GGUF)
    if path.is_file():
        raise CheckpointError("this file is no checkpoint", value=str(path), limit="a folder, or a .gguf file", remedy="Name the folder that it is in.")
    if not path.is_dir():
        raise CheckpointError(
            "there is no such file or folder", value=str(path), limit="a folder with a checkpoint, or a .gguf file", remedy="Correct the path."
        )
    if (path / mf.FILE).exists():
        config = read_json(path / CONFIG) if (path / CONFIG).exists() else {}
        return Identity(NATIVE, "fp4_inductor.save", architecture_of(config))
    files_of(path)
    config = read_json(path / CONFIG)
    source = source_of(config, read_json(path / HF_QUANT_CONFIG) if (path / HF_QUANT_CONFIG).exists() else None)
    return identity_of(config, source)


def source_of(config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The ``quantization_config`` of a config.json, of its text part, or of the hf_quant_config.json ``beside`` it, which ModelOpt
    wrote first; None if there is none."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    source = dict(found) if isinstance(found, Mapping) else None
    # ModelOpt before 0.43 named the layers of a mixed checkpoint only there.
    if beside is not None and (source is None or (str(source.get("quant_algo")).upper() == modelopt.MIXED and not modelopt.layers_of(source))):
        return dict(beside)
    return source


def identity_of(config: Mapping[str, Any], source: dict[str, Any] | None) -> Identity:
    """The identity of a checkpoint with this config.json and this ``quantization_config``.

    Raises:
        CheckpointError: as :func:`.readers.format_of`.
    """
    if source is None:
        return Identity(DENSE, "", architecture_of(config))
    method = format_of(source).METHOD
    name = TRANSFORMERS if method == native.METHOD else method
    return Identity(name, _detail(method, source), architecture_of(config), source)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that config.json names, or ``""``."""
    names = config.get("architectures")
    return str(names[0])[:200] if isinstance(names, list) and names else ""


def _detail(method: str, source: Mapping[str, Any]) -> str:
    if method == modelopt.METHOD:
        body = source.get("quantization", source)
        body = body if isinstance(body, Mapping) else {}
        producer = source.get("producer")
        version = producer.get("version") if isinstance(producer, Mapping) else None
        return " ".join(str(part) for part in ("ModelOpt", version, body.get("quant_algo")) if part)[:200]
    if method == compressed_tensors.METHOD:
        return str(source.get("format") or "")[:200]
    return "save_pretrained of a model quantized here" if method == native.METHOD else ""
