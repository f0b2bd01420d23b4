"""``fp4.norm_router``: an RMSNorm, and the router of a mixture of experts that reads it, in one op.

    fp4.norm_router(x, norm_weight, eps, norm_offset, *rest) == (h, *fp4.router(h, *rest)),   h = norm(x)

``x [T, H]`` is what the norm reads; ``norm_weight [H]`` and ``h [T, H]``, which the experts read, have its dtype. The norm is that of
:mod:`.norm_linear`, ``rest`` and the other two results are those of :mod:`.router`; ``early``, the last of it, says the same of
``norm_weight``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import router
from .contract import OpContract, no_gradient, refuse_gradient
from .norm_linear import check, inputs_behind, rms_norm, rms_norm_reference

Result = tuple[Tensor, Tensor, Tensor]


def reference(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest) -> Result:
    check("norm_router", x, norm_weight)
    h = rms_norm_reference(x, norm_weight, eps, norm_offset)
    return h, *router.reference(h, *rest)


def fake(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest) -> Result:
    check("norm_router", x, norm_weight)
    return torch.empty_like(x, memory_format=torch.contiguous_format), *router.fake(x, *rest)


def in_two_steps(x: Tensor, norm_weight: Tensor, eps: float, norm_offset: float, *rest) -> Result:
    """The norm, then the router: what every device can do."""
    check("norm_router", x, norm_weight)
    h = rms_norm(x, norm_weight, eps, norm_offset)
    return h, *torch.ops.fp4.router(h, *rest)


CONTRACT = OpContract(
    name="norm_router",
    schema=router.CONTRACT.schema.replace("(Tensor x, ", "(Tensor x, Tensor norm_weight, float eps, float norm_offset, ", 1).replace(
        "-> (Tensor,", "-> (Tensor, Tensor,"
    ),
    reference=reference,
    fake=fake,
    inputs=lambda device: inputs_behind(router.inputs(device)),
    tolerance=router.CONTRACT.tolerance,
)
CONTRACT.implement("CompositeExplicitAutograd", in_two_steps)
CONTRACT.differentiate(no_gradient, lambda ctx, inputs, output: refuse_gradient("norm_router", ctx, x=0, norm_weight=1, weight=4, bias=5))
