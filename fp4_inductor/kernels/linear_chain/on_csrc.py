"""The internal operator ``torch.ops.fp4_csrc.linear_chain``, by which compiled graphs call ``csrc/gemm/linear_chain.cu``.

Its arguments are those of ``fp4.linear_chain``, numbers for flags and for the group (``_exchange.py``), and the architecture in the place of
``prefill``. It is defined, and reached, as the
operators of :mod:`fp4_inductor.kernels.csrc` are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _exchange
from ...errors import DeviceError, KernelError
from ...ops import linear_chain
from ...ops.linear_chain import MOST, ChainCall
from ...ops.router import FORMS
from .. import csrc, params
from ..build import aligned
from .cuda import LIBRARY

NAME = LIBRARY.name
_PLAIN, _POINTWISE, _GLU = range(3)  # Finish of csrc/common/epilogue.cuh


def _until_bound(*args: Any) -> tuple[Tensor, ...]:
    device = args[0].device
    if device.type != "cuda":
        raise DeviceError(f"fp4_csrc.{NAME} got tensors elsewhere", value=str(device), limit="cuda", remedy="Call torch.ops.fp4.*, which runs anywhere.")
    return getattr(torch.ops.fp4_csrc, NAME).default(*args) if not csrc.binding() else through_ctypes(*args)


def through_ctypes(*args: Any) -> tuple[Tensor, ...]:
    """The operator where there is no binding."""
    *given, arch = args
    c = ChainCall.of(*given)
    stream = torch.cuda.current_stream(c.x.device).cuda_stream
    results, filled, kept = call_of(c, stream)
    with torch.cuda.device(c.x.device):
        status = params.call(csrc.library(NAME, arch), LIBRARY.function, filled, c.x.device)
    del kept  # it lives until the launch
    if status:
        value = f"cudaError {status} for {len(c.qdata)} products, the first of {tuple(c.qdata[0].shape)} bytes"
        raise KernelError(f"fp4_{NAME} was not launched", value=value, limit="cudaSuccess", remedy=csrc.switch_off(NAME))
    return (*results, *(c.x.new_empty(0) for _ in range(MOST - len(results))))


def call_of(c: ChainCall, stream: int = 0) -> tuple[list[Tensor], params.ChainParams, list[Tensor]]:
    """The results of a call, what the kernel is given, and the copies that have to live until it is launched."""
    results: list[Tensor] = []
    kept: list[Tensor] = []
    products, early = [], bool(c.early)

    def dense(t: Tensor | None) -> Tensor | None:
        if t is not None:
            t = aligned(t)
            kept.append(t)
        return t

    x, more = c.x, {}
    for p in c.products():
        read = {name: dense(t) for name, t in (("codes", p.qdata), ("scale", p.scale), ("norm_weight", p.norm_weight))}
        early = early and read["codes"] is p.qdata and read["scale"] is p.scale and read["norm_weight"] is p.norm_weight
        m, n, k = c.x.shape[0], p.qdata.shape[-2], p.qdata.shape[-1] * 2
        y = x.new_empty(m, n // 2 if p.glu else n)
        if p.routing is not None:
            router, top_k, form, rounded = p.routing
            experts = p.qdata.shape[0]
            y = x.new_empty(top_k, n // 2)
            kept.append(y)
            units = p.global_scale.numel() // experts
            more = dict(routed=len(results), experts=experts, top_k=top_k, units=units, form=FORMS.index(form), rounded=int(rounded))
            more["router"] = dense(router)
        numbers = dict(zip(("second", "third"), (*p.starts, 0, 0), strict=False)) | dict(act=c.act[len(results)], eps=p.eps, norm_offset=p.norm_offset)
        added = results[p.added] if p.added >= 0 else dense(p.residual)
        sizes = dict(M=m, N=n, K=k, dtype=int(x.dtype == torch.float16), stream=stream)
        products.append(params.LinearParams.of(x=dense(x), global_scale=p.global_scale, bias=dense(p.bias), residual=added, y=y, **read, **numbers, **sizes))
        results.append(x.new_empty(0) if p.routing is not None else y)
        x = y
    products[0].early = int(early)
    finish = [_GLU if p.glu else _POINTWISE if p.act or p.adds else _PLAIN for p in c.products()]
    for i, p in enumerate(c.products()):
        if p.routing is not None:
            finish[i + 1] = _POINTWISE  # with or without something to add
    if c.summed:
        ranks = _exchange.of(c.group)
        addresses = (*ranks.addresses, *(0,) * (_exchange.MOST_RANKS - len(ranks.addresses)))
        more |= dict(summed=[int(i in c.summed) for i in range(MOST)], ranks=len(ranks.addresses), rank=ranks.rank, memory=addresses)
    filled = params.ChainParams.of(
        products=products, arrivals=c.arrivals, arrivals_count=c.arrivals.numel(), count=len(products), finish=(*finish, *(0,) * (MOST - len(finish))), **more
    )
    return results, filled, kept


def _fake(*args: Any) -> tuple[Tensor, ...]:
    return linear_chain.fake(ChainCall.of(*args[:-1]))


_DEFAULTS = 'router=None, int[] routing=[], int[] summed=[], str group="", bool early=False, str prefill="auto"'
_SCHEMA = linear_chain.CONTRACT.schema.replace(_DEFAULTS, "router, int[] routing, int[] summed, int group, int early, int arch")
csrc.DEFINITIONS.define(f"{NAME}{_SCHEMA}")
csrc.DEFINITIONS.impl(NAME, _until_bound, "CompositeExplicitAutograd")
torch.library.register_fake(f"fp4_csrc::{NAME}", _fake, lib=csrc.DEFINITIONS)
