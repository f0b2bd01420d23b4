"""Weights and Hessians on which GPTQ's loops over columns are compared bit for bit: in C, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def hessian(k: int) -> Tensor:
    x = torch.randn(2 * k, k) * torch.exp(torch.randn(k))
    return x.T @ x / len(x)


def weights(n: int, k: int) -> dict[str, Tensor]:
    """``[n, k]``: outliers far beyond the scales that the global scale leaves room for, zeros of either sign, ties, small numbers."""
    w = torch.randn(n, k)
    return {
        "random": w,
        "outliers": w * torch.exp(3 * torch.randn(n, k)),
        "ties": (w * 4).round() / 4,
        "small": w * 1e-30,
        "zeros of either sign": torch.where(w > 0, w, -0.0),
    }
