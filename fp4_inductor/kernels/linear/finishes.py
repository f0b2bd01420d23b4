"""The epilogues with which the CUDA kernels of fp4.linear are compiled, and what all of them save."""

from __future__ import annotations

from ..kernel import MEASURED, On

POINTWISE_SUMS, GLU_SUMS = "act(x W + bias) * mul + residual on the float32 sums", "act(gate) * up on the float32 sums of both"


def finishes() -> tuple[tuple[str, str, str], ...]:
    """``(op, FP4_FINISH of csrc/common/epilogue.cuh, what it saves)``."""
    return (
        ("linear_epilogue", "pointwise", f"{POINTWISE_SUMS}: Inductor cannot fuse a pointwise kernel behind an operator"),
        ("linear_glu", "glu", f"{GLU_SUMS}: half the stores, and no pointwise kernel behind it"),
    )


def measured(why: str) -> tuple[On, ...]:
    """On Hopper only."""
    return (On(90, 90, MEASURED, why),)
