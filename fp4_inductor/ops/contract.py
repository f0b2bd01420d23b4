"""What an op promises, in one place: schema, reference, fake, input generator, tolerance.

Every op of ``torch.ops.fp4`` has one file in this folder that builds an :class:`OpContract`. Kernels (F2) attach to the
op by dispatch key and are held to the contract by the same tests: ``opcheck`` on ``inputs``, and the relative
Frobenius error against ``reference`` in float64 within ``tolerance``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .._torch.autograd import below_autograd, returns_no_view
from .._torch.functional import give_twin, written
from ..errors import UnsupportedOpError

LIBRARY = torch.library.Library("fp4", "FRAGMENT")
CONTRACTS: dict[str, OpContract] = {}


@dataclass(frozen=True)
class OpContract:
    """One op.

    Args:
        schema: the signature after the op's name, in torch's schema language.
        reference: plain PyTorch, right for every legal input, written for reading.
        fake: shapes and dtypes only; raises the typed errors a real call would raise for shapes.
        inputs: generator of ``(description, args)`` on a device: aligned, misaligned, empty, M in {0, 1}.
        tolerance: largest relative Frobenius error against the float64 reference, per activation dtype.
        any_strides: its lowering and its kernels take inputs of any strides. Inductor would otherwise copy an input that is
            not in memory yet, once for each reader.
        struct: a class with ``of(*args, **kwargs)``, for ops of many arguments. ``reference``, ``fake`` and what is attached by
            :meth:`implement` are then written for one argument of this class. :attr:`reference` and :attr:`fake` of the contract
            take the op's own arguments all the same.
    """

    name: str
    schema: str
    reference: Callable
    fake: Callable
    inputs: Callable[[torch.device], Iterator[tuple[str, tuple]]]
    tolerance: dict[torch.dtype, float]
    any_strides: bool = False
    struct: Any = None

    def __post_init__(self) -> None:
        for name in ("reference", "fake"):
            object.__setattr__(self, name, self._flat(getattr(self, name)))
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout if self.any_strides else torch.Tag.needs_fixed_stride_order)
        LIBRARY.define(self.name + self.schema, tags=tags)
        torch.library.register_fake(f"fp4::{self.name}", self.fake, lib=LIBRARY)
        CONTRACTS[self.name] = self

    def implement(self, dispatch_key: str, fn: Callable) -> None:
        """Attach a kernel for one dispatch key (``"CPU"``, ``"CUDA"``, ``"CompositeExplicitAutograd"``)."""
        LIBRARY.impl(self.name, returns_no_view(self._flat(fn)), dispatch_key)

    def _flat(self, fn: Callable) -> Callable:
        """``fn`` of :attr:`struct` as a function of the op's arguments."""
        if self.struct is None:
            return fn
        of = self.struct.of

        @functools.wraps(fn)
        def flat(*args: Any, **kwargs: Any) -> Any:
            return fn(of(*args, **kwargs))

        del flat.__wrapped__  # its signature is not that of flat
        return flat

    @functools.cached_property
    def written(self) -> tuple[int, ...]:
        """The numbers of the arguments that a call writes."""
        names = written(self.op)
        return tuple(i for i, argument in enumerate(self.op._schema.arguments) if argument.name in names)

    def refuse_gradients(self) -> None:
        """For an op that writes some of its arguments, which torch lets nobody differentiate: whoever asks for a gradient gets a typed error.

        Autograd is told besides which arguments were written.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in _each(*args, *kwargs.values())):
                raise UnsupportedOpError(
                    f"fp4.{self.name} has no gradient: it writes its arguments",
                    value="requires_grad=True",
                    limit="tensors that require none",
                    remedy="Run under torch.no_grad().",
                )
            with below_autograd():
                result = self.op(*args, **kwargs)
            torch.autograd.graph.increment_version([args[i] for i in self.written if i < len(args) and args[i] is not None])
            return result

        LIBRARY.impl(self.name, call, "Autograd")

    def serve_regions(self) -> None:
        """Let an op that writes some of its arguments stand in a region that is compiled once for all of its calls."""
        give_twin(LIBRARY, self.op, self.schema, self.fake)

    def differentiate(self, backward: Callable, setup_context: Callable) -> None:
        """Register the gradient. Every op has one, if only to refuse: an op without would give None, silently."""
        torch.library.register_autograd(f"fp4::{self.name}", backward, setup_context=setup_context, lib=LIBRARY)

    @property
    def op(self):
        return getattr(torch.ops.fp4, self.name).default


def _each(*args: Any) -> Iterator[Any]:
    """Arguments, and the members of those that are lists."""
    for a in args:
        yield from a if isinstance(a, (list, tuple)) else (a,)


def refuse_gradient(op: str, ctx, **inputs: int) -> None:
    """Raise if autograd asks for the gradient of one of ``inputs`` (name -> position): codes and scales are frozen."""
    # Trailing defaults are not passed to autograd.
    wanted = [name for name, i in inputs.items() if i < len(ctx.needs_input_grad) and ctx.needs_input_grad[i]]
    if wanted:
        raise UnsupportedOpError(
            f"fp4.{op} has no gradient for {', '.join(wanted)}",
            value="requires_grad=True",
            limit="gradients of activations and biases",
            remedy="Call .detach() or .requires_grad_(False) on it, or run under torch.no_grad().",
        )


def no_gradient(ctx, *grads):
    """The backward of an op whose ``setup_context`` refuses every input that requires one."""
    raise UnsupportedOpError(
        "an fp4 op without a gradient was differentiated", value="a backward pass", limit="fp4.linear and fp4.bmm", remedy="Detach the weight's parts."
    )


def cast_for_autocast(x: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What autocast does to ``F.linear``: floating operands but float64 go to the autocast dtype of ``x``'s device."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x, bias
    dtype = torch.get_autocast_dtype(kind)
    if x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(dtype)
    return x, bias if bias is None else bias.to(x.dtype)
