"""The choice on a CPU: one C kernel for each op, which does all M itself."""

from __future__ import annotations

from .common import ROUNDED, first


def linear(call, can):
    if can.ever(ROUNDED):
        if can("cpu"):
            yield 64, "cpu"  # few rows keep their activations as they are
        yield None, ROUNDED
    yield from first(can, "cpu")


def _only(call, can):
    yield from first(can, "cpu")


def linear_glu(call, can):
    yield from first(can, "linear, then act * up")


def linear_epilogue(call, can):
    yield from first(can, "linear, then pointwise")


linear_fp8 = linear_w4a4 = moe = sparse_linear = sparse_moe = _only
