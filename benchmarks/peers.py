"""Other libraries' weight-only FP4 linear layers, each from the canonical NVFP4 parts of one weight, if it can be imported.

Written against humming-kernels 0.1.19, torchao 0.18, vLLM's ``marlin_utils_fp4`` and gemlite's helpers; an API that has
moved is reported, not fatal.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], Tensor]
# Peers that take the very same codes and scales: their error against float64 means something.
EXACT = ("humming", "torchao", "marlin")


def humming(q: Tensor, s: Tensor, g: Tensor) -> Call:
    """W4A16 on humming's own layout, from ModelOpt's tensors."""
    from humming.layer import HummingLayer

    layer = HummingLayer(
        shape_n=q.shape[0], shape_k=q.shape[1] * 2, weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"}, torch_dtype=torch.bfloat16
    ).to(q.device)
    layer.load_from_tensors({"weight": q, "weight_scale": s, "weight_scale_2": g.reshape(1)})
    layer.transform()
    return layer


def torchao(q: Tensor, s: Tensor, g: Tensor) -> Call:
    """torchao's weight-only NVFP4: dequantize and matmul, compiled."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    w = NVFP4Tensor(q, s, 16, torch.bfloat16, per_tensor_scale=g)

    @torch.compile(dynamic=False)
    def linear(x):
        return x @ w.dequantize(torch.bfloat16).t()

    return linear


def marlin(q: Tensor, s: Tensor, g: Tensor) -> Call:
    """vLLM's Marlin."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4

    layer = nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = q.shape[0], q.shape[1] * 2, torch.bfloat16
    layer.weight, layer.weight_scale, layer.weight_global_scale = (nn.Parameter(t, requires_grad=False) for t in (q, s, g))
    fp4.prepare_fp4_layer_for_marlin(layer)
    n, k = q.shape[0], q.shape[1] * 2
    return lambda x: fp4.apply_fp4_marlin_linear(x, layer.weight, layer.weight_scale, layer.weight_global_scale, layer.workspace, n, k)


def gemlite(q: Tensor, s: Tensor, g: Tensor) -> Call:
    """gemlite's W4A16 in MXFP4 (it has no weight-only NVFP4): 4.25 bits, quantized by itself."""
    from gemlite.helper import A16W4_MXFP

    linear = nn.Linear(q.shape[1] * 2, q.shape[0], bias=False, device=q.device, dtype=torch.bfloat16)
    return A16W4_MXFP(device=str(q.device), dtype=torch.bfloat16).from_linear(linear)


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Call]] = {"humming": humming, "torchao": torchao, "marlin": marlin, "gemlite": gemlite}
_PACKAGES = {"humming": "humming", "torchao": "torchao", "marlin": "vllm", "gemlite": "gemlite"}


def available() -> tuple[dict[str, Callable[[Tensor, Tensor, Tensor], Call]], dict[str, str]]:
    """``({peer: how to prepare it}, {peer: why it is left out})``; each is tried on a small weight."""
    usable, missing = {}, {}
    for name, prepare in PEERS.items():
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            missing[name] = f"{_PACKAGES[name]} is not installed"
            continue
        try:
            q = torch.randint(0, 256, (256, 128), dtype=torch.uint8, device="cuda")
            s = torch.ones(256, 16, device="cuda").to(torch.float8_e4m3fn)
            prepare(q, s, torch.tensor(0.37, device="cuda"))(torch.randn(1, 256, device="cuda", dtype=torch.bfloat16))
            usable[name] = prepare
        except Exception as error:  # whatever another library raises
            missing[name] = f"{type(error).__name__}: {str(error)[:120]}"
    return usable, missing
