import json
import logging
import os

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file

from ..quantizers import auto
from ..quantizers.base import DiffusersQuantizer

NAME = "diffusion_pytorch_model"


class FrozenDict(dict):
    __getattr__ = dict.__getitem__


class ModelMixin(torch.nn.Module):
    """``__init__`` of a subclass calls ``register_to_config`` with its arguments."""

    @property
    def config(self):
        return self._internal_dict

    @property
    def dtype(self):
        return next((t.dtype for t in (*self.parameters(), *self.buffers()) if t.is_floating_point()), torch.float32)

    def register_to_config(self, **kwargs):
        previous = dict(self.__dict__.get("_internal_dict", {}))
        logging.getLogger(__name__).debug(f"Updating config from {previous} to {kwargs}")
        self._internal_dict = FrozenDict({**previous, **kwargs})

    @classmethod
    def from_config(cls, config):
        return cls(**{k: v for k, v in config.items() if not k.startswith("_") and k != "quantization_config"})

    def save_config(self, save_directory):
        body = {k: v.to_dict() if hasattr(v, "to_dict") else v for k, v in self.config.items()}
        body.pop("_pre_quantization_dtype", None)
        with open(os.path.join(save_directory, "config.json"), "w") as file:
            json.dump(body | {"_class_name": type(self).__name__}, file)

    def save_pretrained(
        self,
        save_directory,
        is_main_process=True,
        save_function=None,
        safe_serialization=True,
        variant=None,
        max_shard_size="10GB",
        push_to_hub=False,
        **kwargs,
    ):
        quantizer = getattr(self, "hf_quantizer", None)
        if quantizer is not None and not (isinstance(quantizer, DiffusersQuantizer) and quantizer.is_serializable):
            raise ValueError("The model is quantized and is not serializable")
        os.makedirs(save_directory, exist_ok=True)
        if not is_main_process:
            return
        self.save_config(save_directory)
        state = self.state_dict()
        if quantizer is not None:
            state, _ = quantizer.get_state_dict_and_metadata(state, safe_serialization=safe_serialization)
        suffix = f".{variant}" if variant else ""
        split = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size, filename_pattern=f"{NAME}{suffix}{{suffix}}.safetensors")
        for filename, names in split.filename_to_tensors.items():
            save_file({n: state[n].contiguous() for n in names}, os.path.join(save_directory, filename), metadata={"format": "pt"})
        if split.is_sharded:
            with open(os.path.join(save_directory, f"{NAME}.safetensors.index{suffix}.json"), "w") as file:
                json.dump({"metadata": split.metadata, "weight_map": split.tensor_to_filename}, file)

    @classmethod
    def from_pretrained(cls, folder, torch_dtype=None, variant=None, quantization_config=None, device_map=None):
        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
        pre_quantized = config.get("quantization_config") is not None
        quantizer = None
        if pre_quantized or quantization_config is not None:
            wanted = auto.config_from(config["quantization_config"] if pre_quantized else quantization_config)
            quantizer = auto.AUTO_QUANTIZER_MAPPING[wanted.quant_method](wanted, pre_quantized=pre_quantized)
            quantizer.validate_environment(torch_dtype=torch_dtype, device_map=device_map)
            wanted.quant_method.value  # noqa: B018
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch_dtype or before)
        try:
            with torch.device("meta"):
                model = cls.from_config(config)
        finally:
            torch.set_default_dtype(before)
        model.register_to_config(**({} if quantizer is None else {"quantization_config": wanted}))
        suffix = f".{variant}" if variant else ""
        index = os.path.join(folder, f"{NAME}.safetensors.index{suffix}.json")
        single = f"{NAME}{suffix}.safetensors"
        files = [single] if os.path.exists(os.path.join(folder, single)) else sorted(set(json.load(open(index))["weight_map"].values()))  # noqa: SIM115
        if quantizer is not None:
            quantizer.preprocess_model(model=model, device_map=device_map, keep_in_fp32_modules=[])
        expected = model.state_dict()
        shards = [load_file(os.path.join(folder, name)) for name in files]
        missing = list(set(expected) - {key for shard in shards for key in shard})
        if quantizer is not None:
            missing = quantizer.update_missing_keys(model, missing, prefix="")
        for state in shards:
            for name, value in state.items():
                if name in expected:
                    cls._put(model, name, value, expected[name], state, torch_dtype, quantizer)
        if quantizer is not None:
            quantizer.postprocess_model(model)
            model.hf_quantizer = quantizer
        return model.eval()

    @staticmethod
    def _put(model, name, value, expected, state, dtype, quantizer):
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        old = model
        for part in name.split("."):
            old = getattr(old, part)
        if dtype is None and isinstance(old, torch.Tensor):
            value = value.to(old.dtype)
        asked = quantizer is not None and quantizer.check_if_quantized_param(model, value, name, state, param_device="cpu")
        if expected.shape != value.shape:
            if not asked:
                raise ValueError(f"Cannot load because {name} expected shape {expected.shape}, but got {value.shape}.")
            quantizer.check_quantized_param_shape(name, expected, value)
        if asked:
            quantizer.create_quantized_param(model, value, name, "cpu", state, [], dtype=dtype)
            return
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if attribute in module._parameters:
            value = torch.nn.Parameter(value, requires_grad=module._parameters[attribute].requires_grad)
        setattr(module, attribute, value)
