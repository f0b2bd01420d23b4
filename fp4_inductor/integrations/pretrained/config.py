"""The quantization configs that transformers reads from config.json, or takes as ``from_pretrained(quantization_config=...)``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ..._renamed import current, has_old_names
from ...checkpoint.readers import modelopt, native
from ...config import NVFP4Config
from ...errors import ConfigError


class _Stored(QuantizationConfigMixin):
    """Read from a config.json, it takes the option names of earlier versions, too."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        return super().from_dict(current(config_dict), return_unused_kwargs, **kwargs)


@has_old_names
class FP4InductorConfig(_Stored):
    """Quantize a dense model to NVFP4 while it loads; also what ``save_pretrained`` writes for a model quantized here.

    ::

        AutoModelForCausalLM.from_pretrained(path, quantization_config=FP4InductorConfig())

    Args:
        scale_search, prefill, attention: as in :class:`fp4_inductor.NVFP4Config`; ``"activation"`` needs data, so quantize after loading instead.
        ignore: layers to leave alone, as in :func:`fp4_inductor.quantize_model`.
        strict: True raises if a weight cannot be quantized, or a checkpoint does not fit its model. False raises for neither. None
            raises for a checkpoint that does not fit, and for weights that cannot be quantized if they are more than 5 % of all.
        source: the ``quantization_config`` of the checkpoint itself, where another library would claim it: :func:`fp4_inductor.load_pretrained` sets it.
    """

    def __init__(
        self,
        scale_search: str = "four_over_six",
        prefill: str = "auto",
        ignore: Iterable[str] | None = None,
        strict: bool | None = None,
        source: Mapping[str, Any] | None = None,
        version: int = native.VERSION,
        quant_method: str = native.METHOD,
        attention: str = "auto",
        **unknown: Any,
    ):
        if unknown:
            raise ConfigError(
                "FP4InductorConfig: unknown options",
                value=sorted(unknown),
                limit="scale_search, prefill, ignore, strict, attention",
                remedy="Leave them out, or update fp4_inductor.",
            )
        if scale_search in ("activation", "auto", "gptq"):
            raise ConfigError(
                f'scale_search="{scale_search}" cannot run while a model loads',
                value=scale_search,
                limit='"amax", "four_over_six", "mse"',
                remedy="Load the dense model, then call fp4_inductor.quantize_model(model, NVFP4Config(...)).",
            )
        NVFP4Config(scale_search=scale_search, prefill=prefill, attention=attention)  # type: ignore[arg-type]
        self.quant_method = native.METHOD  # type: ignore[assignment]
        self.scale_search, self.prefill, self.strict, self.version = scale_search, prefill, strict, version
        self.attention = attention
        self.ignore = list(ignore) if ignore is not None else None
        self.source = None if source is None else copy.deepcopy(dict(source))

    def to_dict(self) -> dict[str, Any]:
        kept = copy.deepcopy(self.__dict__)
        kept.pop("source")  # where the weights came from, not what a saved model is
        if kept["attention"] == "auto":
            del kept["attention"]  # versions that do not know it can read what they could
        if kept["strict"] is None:
            del kept["strict"]  # versions that know only True and False take their default
        return kept


@has_old_names
class ModelOptConfig(_Stored):
    """``quantization_config`` of a ModelOpt checkpoint, kept as it is."""

    def __init__(self, quant_method: str = modelopt.METHOD, prefill: str = "auto", strict: bool | None = None, **rest: Any):
        self.quant_method, self.prefill, self.strict = quant_method, prefill, strict  # type: ignore[assignment]
        for name, value in rest.items():
            setattr(self, name, value)
