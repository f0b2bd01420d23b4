"""bounds(): the numbers of rows at which kernels change, for who compiles one graph for each range of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ._renamed import takes_old_names
from .config import dispatch_config
from .errors import ConfigError
from .kernels import select
from .kernels.select import Call, plan
from .ops.linear import PREFILL

# Operators that a graph calls once for each weight, and whose kernel the graph chooses. fp4.moe and fp4.decode_attention choose at each call.
OPS = ("linear", "linear_glu", "linear_epilogue", "sparse_linear", "linear_fp8")


@takes_old_names
def bounds(
    layers: nn.Module | Iterable[tuple[int, int] | tuple[str, int, int]],
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    prefill: str | None = None,
) -> list[int]:
    """The numbers of activation rows M (tokens) at which a kernel of these layers gives way to another.

    A graph that is compiled for ``bounds[i] < M <= bounds[i + 1]`` inside :func:`fp4_inductor.compile_range` needs no guard and no choice at run time:
    one kernel serves each layer in the whole range. It follows the :class:`fp4_inductor.DispatchConfig` in force.

    Args:
        layers: a model with quantized layers, of which shapes are read only (meta and CPU will do); or weights: ``(N, K)``, outputs and inputs of a
            dense NVFP4 layer, or ``(op, N, K)`` with op one of ``"linear"``, ``"linear_glu"`` (act(gate) * up, of one weight ``[N, K]`` with N / 2 rows
            each), ``"linear_epilogue"`` (an activation, a product or a residual behind the layer that no norm reads), ``"sparse_linear"`` and
            ``"linear_fp8"`` (an FP8 head). A model is asked for all of those that its layers may become, merged siblings included. Experts
            have no bounds: ``fp4.moe`` chooses its kernels at each call.
        device: ``"cuda"`` or a :class:`torch.device`, with the kernels that are built there; an architecture, with all kernels that this
            package has for it, without a GPU: ``"sm_90"``, or ``90``; ``"cpu"``. None: the current GPU, else the CPU.
        dtype: of the activations. None: that of each layer of a model, bfloat16 for weights.
        prefill: as in :class:`fp4_inductor.NVFP4Config`. None: that of each layer of a model, ``"auto"`` for weights.

    Returns:
        Ascending, each at least 1, without duplicates. Empty if one kernel serves every M.

    Raises:
        fp4_inductor.errors.ConfigError: a device, an architecture, an op or a shape is not one of those above.
        fp4_inductor.errors.KernelError: no kernel serves one of the layers there.

    Example, an H100 and the linear layers of an 8B model, gate and up as one weight::

        >>> fp4_inductor.bounds([(6144, 4096), (4096, 4096), ("linear_glu", 28672, 4096), (4096, 14336)], device="sm_90")
        [1, 32, 64, 128, 8192]
    """
    arch, place = _place(device)
    calls = _of_model(layers, arch, dtype, prefill) if isinstance(layers, nn.Module) else _of_shapes(layers, arch, dtype, prefill)
    found: set[int] = set()
    for call in set(calls):
        built = call if place is None else replace(call, csrc=select.csrc_status(call), triton=select.triton_version())
        found |= {bound for bound in plan(built, dispatch_config()).bounds if bound > 0}
    return sorted(found)


def _place(device: torch.device | str | int | None) -> tuple[int, torch.device | None]:
    """``(architecture, the GPU, or None for an architecture alone)``."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    named = re.fullmatch(r"sm_?(\d+)[af]?", device) if isinstance(device, str) else None
    if named or (isinstance(device, int) and not isinstance(device, bool)):
        arch = int(named[1]) if named else int(device)  # type: ignore[arg-type]
        if not 80 <= arch <= 129:
            raise ConfigError("no such architecture", value=repr(device), limit="sm_80 to sm_129", remedy='Write device="sm_90", or "cpu".')
        return arch, None
    try:
        place = torch.device(device)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        place = torch.device("meta")
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(
            "no kernels for this device",
            value=repr(device),
            limit='"cpu", "cuda" or an architecture',
            remedy='Write device="sm_90" for a GPU that is not here.',
        )
    return select.arch_of(place), place if place.type == "cuda" else None


def _of_model(model: nn.Module, arch: int, dtype: torch.dtype | None, prefill: str | None) -> Iterator[Call]:
    from .models.compile_ahead import calls_of

    for module in model.modules():
        for call in calls_of(module, arch):
            if call.op in OPS:
                yield _checked(replace(call, dtype=dtype or call.dtype, prefill=prefill or call.prefill, triton=(99, 0)))


def _of_shapes(layers: Iterable[Any], arch: int, dtype: torch.dtype | None, prefill: str | None) -> Iterator[Call]:
    for layer in layers:
        op, n, k = layer if len(layer) == 3 else ("linear", *layer) if len(layer) == 2 else ("", 0, 0)
        if op not in OPS or type(n) is not int or type(k) is not int or n < 1 or k < 1:
            raise ConfigError(
                "not the shape of a layer", value=repr(layer), limit=f"(N, K) or (op, N, K) with op one of {OPS}", remedy="Pass a model, or such tuples."
            )
        yield _checked(Call(op, arch, dtype or torch.bfloat16, n, k, prefill or "auto"))


def _checked(call: Call) -> Call:
    if call.prefill not in PREFILL:
        raise ConfigError("prefill is not a known choice", value=repr(call.prefill), limit=list(PREFILL), remedy="NVFP4Config describes them.")
    if call.arch == 0 and call.op in ("linear_glu", "linear_epilogue"):  # the passes make them for CUDA only
        return replace(call, op="linear")
    return call
