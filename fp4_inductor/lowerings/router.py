"""fp4.router and fp4.norm_router: one call of the op, which is told whether it may read the router's weight while the kernel before it runs."""

from __future__ import annotations

from .._torch import lowering as inductor
from ..kernels import select
from ..ops import norm_router, router
from .linear import begins_early


def register() -> None:
    for contract, read in ((router.CONTRACT, (1,)), (norm_router.CONTRACT, (4, 1))):
        inductor.register(contract.op, _lowering(contract.op, read))


def _lowering(op, read: tuple[int, ...]):
    """``read``: the places of what may be read early among the arguments of ``op``, the router's weight first."""
    count = read[0] + 5  # of the arguments, but for ``early``

    def lower(*args):
        given, asked = list(args[:count]), bool(args[count:] and args[count])
        device = given[0].get_device()
        for i, t in enumerate(given):
            if hasattr(t, "get_device"):
                given[i] = inductor.contiguous(t)
        early, _ = begins_early(select.arch_of(device), (given[0],), tuple(given[i] for i in read)) if device.type == "cuda" else (False, "")
        return inductor.call_op(op, *given, asked or early)

    return lower
