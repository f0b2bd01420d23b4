"""FP4 models fast from plain PyTorch: ``quantize_model(model)``, then ``torch.compile(model)``.

Importing this package registers ``torch.ops.fp4`` (schemas, CPU and CUDA implementations, gradients). It imports
neither Triton nor Inductor and does not touch CUDA; the lowerings and graph passes register themselves when Inductor
itself is first imported, which is when something is first compiled.
"""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch

from . import kernels, ops
from ._torch.on_inductor import when_inductor_loads, when_loads

__version__ = "0.1.0"

_PUBLIC = {
    "quantize_model": ".api",
    "save": ".api",
    "load": ".api",
    "load_pretrained": ".integrations.pretrained",
    "export_pretrained": ".integrations.pretrained",
    "KVCache": ".decoding.cache",
    "inspect_checkpoint": ".checkpoint.inspection",
    "evaluate": ".models.evaluate",
    "verify": ".models.verify",
    "recover": ".models.recover",
    "generate": ".generation",
    "generate_loop": ".generation",
    "generation_record": ".generation",
    "release_memory": ".generation",
    "GenerationRecord": ".generation",
    "LoopOptions": ".generation",
    "FP4InductorConfig": ".integrations.pretrained",
    "explain": ".explain",
    "decisions": ".explain",
    "bounds": ".regimes",
    "report": ".report",
    "NVFP4Config": ".config",
    "Sparse24Config": ".config",
    "DispatchConfig": ".config",
    "dispatch": ".config",
    "set_dispatch": ".config",
    "compile_range": ".ranges",
    "add_range_provider": ".ranges",
    "cache_salt": "._salt",
    "NVFP4Tensor": ".tensors",
    "Sparse24NVFP4Tensor": ".tensors",
    "read_sparse24": ".tensors",
    "write_sparse24": ".tensors",
    "FP4Linear": ".modules",
    "FP4Experts": ".modules",
    "FP8Linear": ".modules",
    "Sparse24Linear": ".modules",
    "pack_linear": ".formats.packing",
    "pack_experts": ".formats.packing",
    "PackedLinear": ".formats.packing",
    "PackedExperts": ".formats.packing",
    "reciprocal_scale": ".formats.reciprocal",
    "errors": ".errors",
}
__all__ = sorted(_PUBLIC)

if TYPE_CHECKING:
    from . import errors
    from ._salt import cache_salt
    from .api import load, quantize_model, save
    from .checkpoint.inspection import inspect_checkpoint
    from .config import DispatchConfig, NVFP4Config, Sparse24Config, dispatch, set_dispatch
    from .decoding.cache import KVCache
    from .explain import decisions, explain
    from .formats.packing import PackedExperts, PackedLinear, pack_experts, pack_linear
    from .formats.reciprocal import reciprocal_scale
    from .generation import GenerationRecord, LoopOptions, generate, generate_loop, generation_record, release_memory
    from .integrations.pretrained import FP4InductorConfig, export_pretrained, load_pretrained
    from .models.evaluate import evaluate
    from .models.recover import recover
    from .models.verify import verify
    from .modules import FP4Experts, FP4Linear, FP8Linear, Sparse24Linear
    from .ranges import add_range_provider, compile_range
    from .regimes import bounds
    from .report import report
    from .tensors import NVFP4Tensor, Sparse24NVFP4Tensor, read_sparse24, write_sparse24


def _register_with_inductor() -> None:
    try:
        from . import lowerings, passes

        passes.register()
        lowerings.register()
    except Exception as error:
        # This runs inside somebody's torch.compile, perhaps of a model that is none of ours: say so, and let it compile.
        warnings.warn(
            f"fp4_inductor {__version__} could not register with the Inductor of torch {torch.__version__} ({type(error).__name__}: {error}). "
            "Quantized layers stay right: they call their ops, without fused kernels and graph passes. Supported: torch 2.11 to 2.15.",
            RuntimeWarning,
            stacklevel=2,
        )


def _register_with_transformers() -> None:
    name = f"{__name__}.integrations.pretrained"
    if name in sys.modules:
        return  # it is what imports transformers right now, and registers at its end
    try:
        importlib.import_module(name)
    except Exception as error:
        # This runs inside somebody's import of transformers.
        warnings.warn(
            f"fp4_inductor {__version__} could not register with this transformers ({type(error).__name__}: {error}). "
            "from_pretrained does not know its formats; everything else works. Supported: transformers 5.17 to 5.24.",
            RuntimeWarning,
            stacklevel=2,
        )


def _register_with(library: str, ours: str, without: str) -> None:
    try:
        importlib.import_module(ours, __name__)
    except Exception as error:
        # This runs inside somebody's import of the library.
        warnings.warn(
            f"fp4_inductor {__version__} could not register with this {library} ({type(error).__name__}: {error}). {without}",
            RuntimeWarning,
            stacklevel=2,
        )


when_inductor_loads(_register_with_inductor)
when_loads("transformers.modeling_utils", _register_with_transformers)
when_loads(
    "transformers.generation.continuous_batching.continuous_api",
    lambda: _register_with(
        "transformers", ".integrations.continuous_batching", 'generate_batch refuses a quantized model; NVFP4Config(attention="keep") avoids that.'
    ),
)
when_loads(
    "transformers.trainer",
    lambda: _register_with("transformers", ".integrations.trainer", "Trainer does not refuse to train a quantized model without adapters."),
)
when_loads(
    "diffusers.models.modeling_utils",
    lambda: _register_with(
        "diffusers", ".integrations.diffusers", "save_pretrained of its models is refused when it is read. Supported: diffusers 0.35 to 0.42."
    ),
)
when_loads(
    "huggingface_hub.hub_mixin",
    lambda: _register_with("huggingface_hub", ".integrations.hub_mixin", "Its mixin writes packed layers that it does not read back."),
)
when_loads("peft", lambda: _register_with("peft", ".integrations.peft", "It refuses adapters on quantized layers. Supported: peft 0.19 to 0.21."))


class _Package(types.ModuleType):
    """Keeps ``fp4_inductor.report`` the function: importing the submodule of the same name would rebind it to the module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _PUBLIC.get(name) == f".{name}" and hasattr(value, name):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name], __name__)
    value = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
