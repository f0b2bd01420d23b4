"""Arithmetic with the Hessian of a linear layer's squared output error: ``H = X^T diag(v) X / rows`` of its inputs X ``[rows, K]``.

Pruning (:mod:`.pruning`) and rounding (:mod:`.gptq`) both lower ``tr((W - Q) H (W - Q)^T)``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import NonFiniteError

DAMPING = 0.01  # of the mean of H's diagonal, added to all of it: SparseGPT's and GPTQ's value


def damped(hessian: Tensor, damping: float = DAMPING, own: float = 0.0, keep: bool = True) -> Tensor:
    """``hessian`` in float64 (float32 on devices without) with ``damping`` of its mean diagonal, and ``own`` of each entry itself, added to the diagonal.

    Channels that calibration never excited get that much importance, so that their weights are kept by magnitude. More is
    added, tenfold at a time, until a Cholesky factorisation exists. ``keep``: else ``hessian`` itself may be what is changed: such a matrix of
    12,288 channels has a gigabyte.
    """
    h = hessian.to(torch.float32 if hessian.device.type == "mps" else torch.float64, copy=keep)
    del hessian
    diagonal = h.diagonal().clone()
    mean = diagonal.mean()
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))
    while damping < 1e3:
        h.diagonal().copy_(diagonal * (1 + own) + damping * mean)
        if int(torch.linalg.cholesky_ex(h).info) == 0:
            return h
        damping *= 10
    raise NonFiniteError(
        "the Hessian of a layer's inputs is not positive semi-definite",
        value=f"smallest diagonal entry {float(h.diagonal().min()):.3g}",
        limit="X^T X of finite X",
        remedy="Check the calibration batches.",
    )


def inverse_factor(h: Tensor) -> Tensor:
    """float32 ``[K, K]``: the upper Cholesky factor of the inverse of ``h``, which :func:`damped` gave, found in the precision of ``h``.

    Two matrices of that precision are in use at once, beside ``h`` where the caller keeps it.
    """
    lower = torch.linalg.cholesky(h)
    del h
    inverse = torch.cholesky_inverse(lower)
    del lower
    upper = torch.linalg.cholesky(inverse, upper=True)
    del inverse
    return upper.float()


def output_error(w: Tensor, q: Tensor, hessian: Tensor | None) -> float:
    """``|X (W - Q)^T| / |X W^T|`` for the inputs behind ``hessian``; of the weights themselves if that is None. 0 for a zero output."""
    top, bottom = output_energy(w.float() - q.float(), hessian), output_energy(w, hessian)
    return math.sqrt(top / bottom) if bottom > 0 else 0.0


def output_energy(w: Tensor, hessian: Tensor | None) -> float:
    """``tr(W H W^T)``: the squared outputs of ``w`` per row of the inputs behind ``hessian``; ``|W|^2`` if that is None."""
    w = w.float()
    if hessian is None:  # in float64, where the square of no float32 is zero or infinite
        return float(torch.linalg.vector_norm(w, dtype=torch.float32 if w.device.type == "mps" else torch.float64)) ** 2
    return max(0.0, float(((w @ hessian) * w).sum(dtype=torch.float64)))


def check_hessian(hessian: Tensor) -> None:
    """Raise NonFiniteError if ``hessian`` holds NaN or Inf."""
    if not bool(torch.isfinite(hessian).all()):
        raise NonFiniteError("the Hessian holds NaN or Inf", value=tuple(hessian.shape), limit="finite", remedy="Check the calibration batches.")
