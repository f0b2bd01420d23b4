"""fp4.router and fp4.norm_router: one call of the op, which is told whether it may read its weights while the kernel before it runs."""

from __future__ import annotations

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..kernels import select
from ..kernels.select import plan
from ..ops import norm_router, router
from .decode_attention import RUNTIME
from .journal import record
from .linear import begins_early, join
from .regime import known


def register() -> None:
    for contract, read, note in ((router.CONTRACT, (1,), ""), (norm_router.CONTRACT, (4, 1), "the RMSNorm of its input is in the kernel")):
        inductor.register(contract.op, _lowering(contract.op, read, note))


def _lowering(op, read: tuple[int, ...], note: str):
    """``read``: the places of what may be read early among the arguments of ``op``, the router's weight first."""
    count = read[0] + 5  # of the arguments, but for ``early``

    def lower(*args):
        given, asked = list(args[:count]), bool(args[count:] and args[count])
        for i, t in enumerate(given):
            if hasattr(t, "get_device"):
                given[i] = inductor.contiguous(t)
        x, weight = given[0], given[read[0]]
        device, symbols = x.get_device(), inductor.Symbols()
        early, told = begins_early(select.arch_of(device), (x,), tuple(given[i] for i in read))
        experts, width = map(symbols.static_int, weight.get_size())
        if experts and width:
            tokens = inductor.rows_of(x)
            options = plan(select.describe("router", device, x.get_dtype(), experts, width), dispatch_config())
            record(options, known(options, tokens, symbols, RUNTIME), tokens, note=join(note, told))
        return inductor.call_op(op, *given, asked or early)

    return lower
