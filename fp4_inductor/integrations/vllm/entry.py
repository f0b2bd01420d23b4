"""The name that vLLM looks up, and which checkpoints it stands for. The configs of the formats (:mod:`.config`, :mod:`.own`) are imported when one is met."""

from __future__ import annotations

from typing import Any

import torch

from .engine import QuantizationConfig
from .named import Named
from .refusals import ACTIVATIONS, check_format, kind_of
from .settings import KEY


class FP4Config(Named):
    """What is registered. :meth:`from_config` returns the config of the checkpoint's format; without one, :class:`.own.OwnConfig`."""

    def __new__(cls) -> Any:
        # vLLM found no quantization_config: a dense checkpoint, or a folder of fp4_inductor.save
        from .own import OwnConfig

        return OwnConfig()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any] | None, user_quant: str | None, hf_config: Any = None) -> str | None:
        """Our own checkpoints always; others only if the user asks by name: a plugin that is installed changes nothing else."""
        if not hf_quant_cfg:
            return None
        kind = kind_of(hf_quant_cfg)
        if kind == "own":
            return KEY
        return KEY if user_quant == KEY and check_format(hf_quant_cfg, kind) else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        kind = check_format(config, kind_of(config))
        if kind == "own":
            from .own import OwnConfig

            return OwnConfig(config)
        from . import config as formats

        made: Any = {"modelopt": formats.ModelOptConfig, "mixed": formats.MixedConfig, "compressed-tensors": formats.CompressedConfig}[kind]
        return made.from_config(config)

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return ACTIVATIONS
