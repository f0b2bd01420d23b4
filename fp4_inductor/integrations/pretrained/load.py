"""``load_pretrained``: one call for every quantized checkpoint that there is a reader for."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..._renamed import takes_old_names
from ...checkpoint.manifest import FILE as NATIVE
from ...checkpoint.readers import format_of, modelopt
from ...checkpoint.shards import CONFIG, INDEX, SINGLE, Shards, open_shards, read_json
from ...errors import CheckpointError, ConfigError, FP4Error
from ...models.preflight import check_device
from ...models.training import outside_inference_mode
from .config import FP4InductorConfig
from .gguf import load_gguf
from .native_folder import load_native
from .place import adapter_options, find_checkpoint, hub_options

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HF_QUANT_CONFIG = "hf_quant_config.json"
_COUNTS = re.compile(r"(num_.*(layers|experts)|n_layers?|n_routed_experts|.*_num_experts)$")
_SLACK = 64
_HUB = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "proxies", "force_download")
_CODE = ("trust_remote_code", "code_revision")
_NO_CODE = {"trust_remote_code": False}  # None would ask at the terminal
_BUILD = "Build the model yourself, load its dense weights and call fp4_inductor.quantize_model."


@takes_old_names
@outside_inference_mode
def load_pretrained(
    path_or_id: str | os.PathLike,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
    prefill: str = "auto",
    attention: str | None = None,
    model_class: Any = None,
    **options: Any,
) -> nn.Module:
    """Load a quantized model, its codes and scales bit for bit, and run it in FP4 on any device.

    Reads ModelOpt NVFP4, compressed-tensors ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``, gpt-oss MXFP4, torchao
    ``NVFP4Tensor``, GGUF files with NVFP4 or MXFP4 tensors (the architectures transformers reads), and what ``save_pretrained`` or
    :func:`fp4_inductor.save` write for models quantized here: file by file, straight to ``device``.
    No pickle is read and no code of the checkpoint is run.

    Args:
        path_or_id: a directory, a ``.gguf`` file, or a hub id (``revision``, ``token``, ``cache_dir``, ``subfolder`` and
            ``variant`` are passed on). Where the hub cannot be reached, what is in its cache is read.
        device: where the model goes; the CPU if None. ``device_map`` is passed on instead if given.
        dtype: of what is not quantized, and of activations; None takes what config.json says.
        strict: raise for tensors that are missing on either side, and for weights that NVFP4 cannot hold without loss.
            False names them in the report and keeps the latter in high precision. If the checkpoint is of another task (a
            language model read as a classifier), tensors that the model does not need are no error; nor is a head that is
            not in the checkpoint, which transformers initialises, if ``model_class`` is given.
        prefill: as in :class:`fp4_inductor.NVFP4Config`.
        attention: as in :class:`fp4_inductor.NVFP4Config`; None takes what the model was saved with, else "auto".
        model_class: an auto class or model class of transformers; ``AutoModelForCausalLM`` if None.
        options: of ``from_pretrained``, e.g. ``revision``, ``attn_implementation``, ``device_map``, ``tp_plan``.

    Returns:
        The model in eval mode; ``fp4_inductor.report(model)`` says what became of every parameter.

    Raises:
        CheckpointError, CoverageError, ConfigError, DeviceError: nothing is left half loaded.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # not above: this module is imported while transformers is

    if refused := [name for name in _CODE if options.get(name)]:
        raise ConfigError("load_pretrained runs no code of a checkpoint", value=refused, limit="none of them", remedy=_BUILD)
    where = check_device(device)
    if where is not None and options.get("device_map") is not None:
        raise ConfigError("device and device_map say the same", value=[str(where), options["device_map"]], limit="one of them", remedy="Leave out device.")
    auto = AutoModelForCausalLM if model_class is None else model_class
    path, on_hub = find_checkpoint(path_or_id, options)
    if on_hub:
        options |= hub_options(str(path_or_id), options)
        options |= adapter_options(options)
    hub: dict[str, Any] = {k: options[k] for k in _HUB if k in options}
    for name in _CODE:
        options.pop(name, None)
    if where is not None:
        options["device_map"] = {"": where}
    options["dtype"] = "auto" if dtype is None else dtype
    if path.suffix == ".gguf" and path.is_file():
        return load_gguf(path, auto, prefill, strict, options, attention or "auto")
    if not on_hub and (path / NATIVE).exists():
        if not (path / CONFIG).exists():
            remedy = "Build the model yourself: fp4_inductor.load(lambda: Model(...), folder)."
            raise CheckpointError("the folder does not say which model it is of", value=str(path), limit=f"a folder with {CONFIG}", remedy=remedy)
        if other := next((name for name in (SINGLE, INDEX) if (path / name).exists()), None):
            remedy = "Remove the one that is not meant."
            raise CheckpointError("the folder holds two checkpoints", value=f"{NATIVE}; {other}", limit="one of them", remedy=remedy)
        config = typed(lambda: AutoConfig.from_pretrained(path, **_NO_CODE), path)
        take_quantization_config(config)
        return typed(lambda: load_native(path, auto, config, where, strict, prefill, attention or "auto", options), path)
    if not on_hub:
        check_config(read_json(path / CONFIG), open_shards(path, options.get("variant")))
    config = typed(lambda: AutoConfig.from_pretrained(path_or_id, **hub, **_NO_CODE), path_or_id)
    source = take_quantization_config(config)
    if source is None or (str(source.get("quant_algo")).upper() == modelopt.MIXED and not modelopt.layers_of(source)):
        source = _hf_quant_config(path_or_id, hub) or source  # ModelOpt before 0.43 named the layers of a mixed checkpoint only there
    format_of(source)
    saved = source.get("attention") if source else None
    strictly = None if strict and model_class is not None else strict  # whoever names a class may mean another task than the checkpoint's
    wanted = FP4InductorConfig(prefill=prefill, strict=strictly, source=source, attention=attention or saved or "auto")
    return typed(lambda: auto.from_pretrained(path_or_id, config=config, quantization_config=wanted, **options, **_NO_CODE), path_or_id)


def check_config(config: Mapping[str, Any], shards: Shards) -> None:
    """Refuse a config.json that asks for more layers or experts than there are tensors, before anyone builds them."""
    for part in (config, *(v for v in config.values() if isinstance(v, Mapping))):
        for name, value in part.items():
            if _COUNTS.search(name) and type(value) is int and value > len(shards.entries) + _SLACK:
                raise CheckpointError(f"config.json: {name}", value=value, limit=f"{len(shards.entries)} tensors in all", remedy="Download config.json again.")


def typed(do: Callable[[], Any], path: str | os.PathLike) -> Any:
    """Run transformers' own code on files that may be damaged: what it raises about them becomes a CheckpointError."""
    try:
        return do()
    except (FP4Error, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise CheckpointError(
                f"{Path(path).name} needs code that comes with it, and no code of a checkpoint is run here",
                value="auto_map in config.json",
                limit="architectures that transformers has itself",
                remedy=_BUILD,
            ) from error
        raise CheckpointError(
            f"transformers cannot load {Path(path).name}",
            value=f"{type(error).__name__}: {str(error)[:500]}",
            limit="a config.json that this version of transformers knows, and the weights that go with it",
            remedy="Download the checkpoint again, or update transformers.",
        ) from error


def take_quantization_config(config: PretrainedConfig) -> dict[str, Any] | None:
    """Remove ``quantization_config`` from a config, and from its text part, and return it."""
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            del part.quantization_config
            return copy.deepcopy(dict(found) if isinstance(found, Mapping) else found.to_dict())
    return None


def _hf_quant_config(path_or_id: str | os.PathLike, hub: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ModelOpt wrote beside config.json before it wrote into it."""
    from transformers.utils import cached_file

    file = cached_file(path_or_id, HF_QUANT_CONFIG, _raise_exceptions_for_missing_entries=False, **hub)
    return None if file is None else read_json(Path(file))
