"""What an op promises, in one place: schema, reference, fake, input generator, tolerance.

Every op of ``torch.ops.fp4`` has one file in this folder that builds an :class:`OpContract`. Kernels (F2) attach to the
op by dispatch key and are held to the contract by the same tests: ``opcheck`` on ``inputs``, and the relative
Frobenius error against ``reference`` in float64 within ``tolerance``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

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
    """

    name: str
    schema: str
    reference: Callable
    fake: Callable
    inputs: Callable[[torch.device], Iterator[tuple[str, tuple]]]
    tolerance: dict[torch.dtype, float]

    def __post_init__(self) -> None:
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
        LIBRARY.define(self.name + self.schema, tags=tags)
        torch.library.register_fake(f"fp4::{self.name}", self.fake, lib=LIBRARY)
        CONTRACTS[self.name] = self

    def implement(self, dispatch_key: str, fn: Callable) -> None:
        """Attach a kernel for one dispatch key (``"CPU"``, ``"CUDA"``, ``"CompositeExplicitAutograd"``)."""
        LIBRARY.impl(self.name, fn, dispatch_key)

    @property
    def op(self):
        return getattr(torch.ops.fp4, self.name).default
