"""``fp4.router`` in place of a layer's gate and of vLLM's router: scores, softmax and choice in one launch or two.

vLLM runs gate, router and experts one after another in Python, on a GPU inside one operator that is not traced. So no graph pass is needed: the
gate that the layer's runner holds is replaced by one that hands the tokens on, and the router computes weights and ids from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._torch.autograd import below_torch_function
from ...errors import FP4Error
from ...kernels import select
from ...kernels.router import launch
from ...kernels.select import Call
from ...ops import router
from .engine import choose_experts, obstacles, runner_of
from .log import say_once
from .settings import Settings


def take(layer: Any, moe: Any, settings: Settings, compilation: Any) -> str:
    """Let ``fp4.router`` choose the experts of a layer whose weights are loaded, if that computes what vLLM's router does. An engine logs each answer once.

    Args:
        moe: vLLM's FusedMoEConfig. compilation: of the engine; None: the layer belongs to none.
    Returns:
        Why vLLM's router goes on; "" if it does not.
    """
    if compilation is None:
        return "the layer belongs to no engine"
    runner = runner_of(layer, compilation)
    reason = why_not(runner, moe, settings)
    if not reason:
        k, form = runner.router.top_k, form_of(runner.router)
        gate = runner.gate.weight
        experts, width = gate.shape
        select.compile_ahead([Call("router", select.arch_of(gate.device), gate.dtype, experts, width, triton=select.triton_version())])

        def route(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            args = x, weight, bias, k, form, torch.float32, True  # no kernel of a step writes a gate
            if torch.compiler.is_compiling() or not x.is_cuda:
                return torch.ops.fp4.router(*args)
            with below_torch_function():  # vLLM's parameters would see each function that gets one
                return launch.serve(*args)  # :func:`why_not` has checked the layer

        choose_experts(runner, route)
    say_once(f"vLLM's router chooses experts: {reason}" if reason else "fp4.router chooses experts", compilation)
    return reason


def why_not(runner: Any, moe: Any, settings: Settings) -> str:
    """Why ``fp4.router`` does not choose the experts of a layer; "" if it can."""
    if settings.router == "vllm":
        return 'additional_config has "router": "vllm"'
    if reason := next(obstacles(runner, moe), ""):
        return reason
    gate, plain = runner.gate, runner.router
    tokens = torch.empty(1, moe.hidden_dim, dtype=moe.in_dtype, device="meta")
    try:
        router.check(tokens, gate.weight, gate.bias, plain.top_k, form_of(plain), torch.float32)
    except FP4Error as error:
        return f"{error.what}: {error.value}, accepted: {error.limit}"
    return ""


def form_of(plain: Any) -> str:
    """Of ``fp4.router``, from a router of vLLM's. Divided by their sum, the k largest of a softmax over all are a softmax over the k largest, too (gpt-oss)."""
    return "normalized" if plain.renormalize else "softmax"
