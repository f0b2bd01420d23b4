"""Models that are not quantized yet: which format is it, which class is it, load it without surprises."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from ...checkpoint.identify import HF_QUANT_CONFIG, Identity, identify, identity_of, source_of
from ...checkpoint.shards import CONFIG, read_json
from ...errors import CheckpointError, bullet_names, list_names
from ...models.preflight import check_device
from .load import typed
from .place import adapter_options, find_checkpoint, hub_options


def identify_pretrained(path_or_id: str | os.PathLike, **hub: Any) -> Identity:
    """The format of a folder, a ``.gguf`` file or a repository on the hub, told by its small files.

    Args:
        path_or_id: as for :func:`fp4_inductor.load_pretrained`.
        hub: options of ``from_pretrained`` about the hub: ``revision``, ``token``, ``cache_dir``.

    Raises:
        CheckpointError: there is no such checkpoint, or its format has no reader here. ConfigError: no path.
    """
    path, on_hub = find_checkpoint(path_or_id, hub)
    if not on_hub:
        return identify(path)
    options = hub | hub_options(str(path_or_id), hub)

    def read(name: str) -> dict[str, Any] | None:
        file = cached_file(path_or_id, name, _raise_exceptions_for_missing_entries=False, **options)
        return None if file is None else read_json(Path(file))

    config = typed(lambda: read(CONFIG), path_or_id)
    if config is None:
        raise CheckpointError("this repository holds no model", value=str(path_or_id), limit=f"a repository with {CONFIG}", remedy="Correct the hub id.")
    return identity_of(config, source_of(config, typed(lambda: read(HF_QUANT_CONFIG), path_or_id)))


def class_of(architecture: str) -> Any:
    """The model class of Transformers that config.json names, which has the parts that were saved; ``AutoModelForCausalLM`` if there
    is none of this name."""
    import transformers

    found = getattr(transformers, architecture, None) if architecture.isidentifier() else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModelForCausalLM


def load_dense(
    path_or_id: str | os.PathLike, *, device: torch.device | str | None = None, dtype: torch.dtype | str = "auto", model_class: Any = None, **hub: Any
) -> PreTrainedModel:
    """Load a model that is not quantized, as ``from_pretrained`` does, but with errors where that one warns or asks.

    Weights that the checkpoint does not have would be random: they are an error. Pickled weights are not read, no code of the
    checkpoint is run, and nobody is asked whether it may be.

    Args:
        path_or_id: a folder, or a hub id. Where the hub cannot be reached, what is in its cache is read.
        device: where the model goes; the CPU if None.
        dtype: of the model; ``"auto"`` takes what config.json says.
        model_class: a class of Transformers; the one that config.json names if None.
        hub: options of ``from_pretrained`` about the hub: ``revision``, ``token``, ``cache_dir``.

    Returns:
        The model in eval mode.

    Raises:
        CheckpointError: no such checkpoint, damaged or incomplete weights, a model that Transformers does not know. DeviceError.
    """
    where = check_device(device)
    _, on_hub = find_checkpoint(path_or_id, hub)
    options = hub | (hub_options(str(path_or_id), hub) if on_hub else {}) | {"trust_remote_code": False}
    config = typed(lambda: AutoConfig.from_pretrained(path_or_id, **options), path_or_id)
    loader = class_of((config.architectures or [""])[0]) if model_class is None else model_class
    if where is not None and where.type != "cpu":  # a device_map needs the accelerate package
        options["device_map"] = {"": where}
    options |= adapter_options(options)
    load = lambda: loader.from_pretrained(path_or_id, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options)  # noqa: E731
    model, found = typed(load, path_or_id)
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"the checkpoint lacks weights of {type(model).__name__}, which would be random:\n{bullet_names(missing)}\n",
            value=f"{len(missing)} tensors missing",
            limit="every weight of the model",
            remedy="Download the checkpoint again, or load it as the model that it was saved from.",
        )
    if unused := sorted(found["unexpected_keys"]):
        warnings.warn(f"{len(unused)} tensors of the checkpoint are not in {type(model).__name__}: {list_names(unused)}", stacklevel=2)
    return model.eval()
