"""What is not served, each by name, before the memory for it is taken: one function for each question."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ConfigError, DeviceError, ShapeError, UnsupportedOpError
from ...formats import nvfp4, sparse24
from .settings import KEY

ACTIVATIONS = [torch.bfloat16, torch.float16, torch.float32]
LEAST_CAPABILITY = 80
_EXCHANGES = ("naive", "allgather_reducescatter")  # of tokens between data-parallel ranks: what vLLM does without a kernel of the method's
_DENSE = 'Serve it without quantization="fp4_inductor", with the method that wrote it.'


def check_platform(platform: Any) -> None:
    """Raise DeviceError for a device that no kernel is written for."""
    if not (platform.is_cuda() or platform.is_cpu()):
        raise DeviceError("fp4_inductor has no kernels for this platform", value=platform.device_name, limit="NVIDIA GPUs, CPUs", remedy=_DENSE)
    capability = platform.get_device_capability() if platform.is_cuda() else None
    if capability is not None and capability.to_int() < LEAST_CAPABILITY:
        raise DeviceError(
            "fp4_inductor has no kernels for this GPU",
            value=f"compute capability {capability.major}.{capability.minor}",
            limit=f">= {LEAST_CAPABILITY // 10}.{LEAST_CAPABILITY % 10}",
            remedy="Take a GPU of the Ampere generation or later; a dense model runs here without quantization.",
        )


def check_columns(prefix: str, here: int, whole: int, sparse: bool, online: bool = False) -> None:
    """Raise ShapeError unless a rank holds whole blocks of every row.

    Args:
        here: columns of the weight on this rank. whole: of all ranks.
    """
    multiple = sparse24.K_MULTIPLE if sparse else nvfp4.GROUP
    if here % multiple:
        ranks = f"{whole} columns over {whole // here} ranks" if here and whole > here else f"{whole} columns"
        fewer = "Use fewer tensor-parallel ranks" if whole % multiple == 0 else "Quantize the model without this layer"
        named = f', or leave the layer in bf16: additional_config={{"fp4_inductor": {{"ignore": ["{prefix.rpartition(".")[2]}"]}}}}' if online else ""
        raise ShapeError(
            f"{prefix}: a rank does not hold whole blocks of a row",
            value=f"{here} ({ranks})",
            limit=f"a multiple of {multiple} ({'2:4-sparse NVFP4' if sparse else 'NVFP4'})",
            remedy=f"{fewer}{named}.",
        )


def check_experts(prefix: str, moe: Any) -> None:
    """Raise UnsupportedOpError for a way to run experts that is not served. ``moe``: vLLM's FusedMoEConfig."""
    parallel = moe.moe_parallel_config
    if getattr(moe, "is_lora_enabled", False):
        raise UnsupportedOpError(
            f"{prefix}: LoRA on a model with experts is not served",
            value="enable_lora=True",
            limit="LoRA on models of linear layers",
            remedy="Leave out --enable-lora, or merge the adapter and quantize the merged model.",
        )
    if parallel.use_batched_activation_format:
        raise UnsupportedOpError(
            f"{prefix}: experts with batched activations are not served",
            value=f"all2all_backend {parallel.all2all_backend!r}",
            limit=list(_EXCHANGES),
            remedy="Choose another --all2all-backend.",
        )
    if parallel.use_all2all_kernels and parallel.all2all_backend not in _EXCHANGES:
        raise UnsupportedOpError(
            f"{prefix}: this exchange of tokens between data-parallel ranks is not served",
            value=parallel.all2all_backend,
            limit=list(_EXCHANGES),
            remedy="Choose another --all2all-backend.",
        )
    if parallel.enable_eplb:
        raise UnsupportedOpError(
            f"{prefix}: balancing experts between ranks is not served", value="enable_eplb=True", limit="False", remedy="Leave out --enable-eplb."
        )


NVFP4 = ("NVFP4", "W4A16_NVFP4")
_MIXED = "MIXED_PRECISION"


def kind_of(source: dict[str, Any]) -> str | None:
    """``"own"``, ``"modelopt"``, ``"mixed"`` or ``"compressed-tensors"``, told by a ``quantization_config``; None: no NVFP4 weights in it."""
    method = str(source.get("quant_method", "")).lower()
    if method == KEY:
        return "own"
    if method.startswith("modelopt"):
        algorithm = str((source.get("quantization") or source).get("quant_algo", "")).upper()
        return "modelopt" if algorithm in NVFP4 else "mixed" if algorithm == _MIXED else None
    if method == "compressed-tensors":
        return "compressed-tensors" if any(_is_nvfp4(group.get("weights") or {}) for group in (source.get("config_groups") or {}).values()) else None
    return None


def _is_nvfp4(weights: dict[str, Any]) -> bool:
    want = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return all(weights.get(name) == value for name, value in want.items())


def check_format(source: dict[str, Any], kind: str | None) -> str:
    """``kind``, or ConfigError for a checkpoint that was asked to be served and has no NVFP4 weights that this package reads."""
    if kind is None:
        algorithm = (source.get("quantization") or source).get("quant_algo") or source.get("format")
        raise ConfigError(
            'quantization="fp4_inductor" does not serve this checkpoint',
            value=f"quant_method {source.get('quant_method')!r}{f', {algorithm}' if algorithm else ''}",
            limit="fp4_inductor; modelopt (NVFP4, W4A16_NVFP4, MIXED_PRECISION); compressed-tensors (nvfp4-pack-quantized); a dense checkpoint",
            remedy="Leave out quantization=, and vLLM serves it by its own method.",
        )
    return kind
