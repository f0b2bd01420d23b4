"""Pruning a dense weight to 2:4-sparse NVFP4 so that the layer's output changes as little as possible.

For inputs X the squared output error of a candidate Q is ``tr((W - Q) H (W - Q)^T)`` with ``H = X^T X / rows``. From cheap to good:

* :func:`wanda`: keep the larger ``|w| * sqrt(H[k, k])`` of each group. Source: Sun et al., "A Simple and Effective Pruning
  Approach for Large Language Models" (2023).
* :func:`sparsegpt`: column after column, what pruning and FP4 rounding do to one column is made good by those to its right.
  Source: Frantar and Alistarh, "SparseGPT" (2023); rounding joins the loop as in their GPTQ.
* :func:`admm`: the pattern and the values of the whole row at once, by operator splitting. Source: Meng et al., "ALPS" (2024).

The last two end in :func:`refine`: coordinate descent over the kept codes, which lowers the error at every step. Scales are
fitted to what is kept, never to what was dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError
from . import e2m1, nvfp4
from .hessian import check_hessian, damped, inverse_factor
from .nvfp4 import scale_values, to_grid
from .sparse24 import Sparse24Parts, compress, mask_of_scores, quantize_sparse24

SWEEPS = 4  # of refine(): the fifth gains less than 0.2% of the error
_BLOCK = 128
_ADMM_STEPS, _ADMM_RHO = 150, 0.1
# ALPS, section 3.3: every third step the penalty grows with the share of the mask that still moves.
_ADMM_EVERY, _ADMM_GROWTH = 3, ((0.025, 1.3), (0.00125, 1.2), (0.0, 1.1))


def magnitude(w: Tensor, hessian: Tensor | None = None, scale_search: str = "mse") -> Sparse24Parts:
    """Keep the larger magnitudes. ``hessian``, if given, weighs errors in ``scale_search="activation"``."""
    return quantize_sparse24(w, mask_of_scores(w.abs()), scale_search, channel_weight=None if hessian is None else hessian.diagonal())


def wanda(w: Tensor, hessian: Tensor, scale_search: str = "activation") -> Sparse24Parts:
    """Keep the larger ``|w| * sqrt(E[x^2])``; the values stay what they are.

    Args:
        w: ``[N, K]``, K a multiple of 32.
        hessian: ``[K, K]``, of which the diagonal is used.
    """
    second_moment = damped(_checked(w, hessian)).diagonal().float()
    return quantize_sparse24(w, mask_of_scores(w.float().abs() * second_moment.sqrt()), scale_search, channel_weight=second_moment)


def sparsegpt(w: Tensor, hessian: Tensor, scale_search: str = "activation") -> Sparse24Parts:
    """SparseGPT with FP4 rounding inside the loop, then :func:`refine`.

    Args:
        w: ``[N, K]`` bfloat16, float16 or float32, K a multiple of 32. Need not be the original weight: the best dense
            answer to the inputs behind ``hessian``.
        hessian: ``[K, K]`` float32, ``X^T X / rows``.
        scale_search: as in :func:`.nvfp4.quantize`; ``"activation"`` weighs errors with the diagonal of ``hessian``.

    Raises:
        ShapeError, NonFiniteError.
    """
    h = damped(_checked(w, hessian))
    factor = inverse_factor(h)
    target = w.float()
    n, k = target.shape
    g = nvfp4.global_scale_of(nvfp4.check_finite(target), scale_search)
    rest, q = target.clone(), torch.zeros_like(target)
    mask = torch.zeros_like(target, dtype=torch.bool)
    codes = torch.zeros(n, k // nvfp4.GROUP, dtype=torch.uint8, device=w.device)
    step = factor.diagonal()
    for start in range(0, k, _BLOCK):
        end = min(start + _BLOCK, k)
        errors = torch.zeros(n, end - start, device=w.device)
        for c in range(start, end):
            if c % nvfp4.GROUP == 0:
                block = slice(c, c + nvfp4.GROUP)
                # Groups further right will move a little until their turn: their pattern here only serves the scale.
                likely = mask_of_scores(rest[:, block].abs() / step[block])
                codes[:, c // nvfp4.GROUP] = _fit_scales(rest[:, block] * likely, g, scale_search, h.diagonal()[block])[:, 0]
                scale = scale_values(codes[:, c // nvfp4.GROUP], g)
            if c % 4 == 0:
                mask[:, c : c + 4] = mask_of_scores(rest[:, c : c + 4].abs() / step[c : c + 4])
            q[:, c] = to_grid(rest[:, c], scale) * mask[:, c]
            error = (rest[:, c] - q[:, c]) / step[c]
            rest[:, c:end] -= error[:, None] * factor[c, c:end]
            errors[:, c - start] = error
        rest[:, end:] -= errors @ factor[start:end, end:]
    return _pack(refine(target, h.float(), q, mask, scale_values(codes, g)), mask, codes, g)


def admm(w: Tensor, hessian: Tensor, scale_search: str = "activation") -> Sparse24Parts:
    """Pattern and values of whole rows by ADMM, rounded to FP4, then :func:`refine`. Arguments as for :func:`sparsegpt`.

    Slower (a matrix inverse per change of the penalty) and better: 20 to 25% less output error on trained weights.
    """
    h = damped(_checked(w, hessian))
    root = h.diagonal().sqrt().float()
    normal = (h / h.diagonal().sqrt() / h.diagonal().sqrt()[:, None]).float()  # unit diagonal: one penalty fits all channels
    target = w.float()
    wanted = target * root
    kept, dual, old = wanted * mask_of_scores(wanted.abs()), torch.zeros_like(wanted), None
    pull, rho, inverse = wanted @ normal, _ADMM_RHO, None
    eye = torch.eye(len(root), device=w.device)
    for i in range(_ADMM_STEPS):
        if inverse is None:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(normal + rho * eye))
        free = (pull + rho * (kept - dual)) @ inverse
        dual += free
        mask = mask_of_scores(dual.abs())
        kept = dual * mask
        dual -= kept
        if i % _ADMM_EVERY == _ADMM_EVERY - 1:
            moved = 1.0 if old is None else float((mask != old).float().mean())
            if moved == 0.0:
                break
            rho *= next(growth for share, growth in _ADMM_GROWTH if moved > share)
            old, inverse = mask, None
    kept = refine(target, h.float(), kept / root, mask)  # the best values on that pattern, before they are rounded
    g = nvfp4.global_scale_of(nvfp4.check_finite(kept), scale_search)
    codes = _fit_scales(kept, g, scale_search, h.diagonal())
    scale = scale_values(codes, g)
    q = to_grid(kept, scale.repeat_interleave(nvfp4.GROUP, dim=1))
    return _pack(refine(target, h.float(), q, mask, scale), mask, codes, g)


def refine(target: Tensor, h: Tensor, q: Tensor, mask: Tensor, scale: Tensor | None = None, sweeps: int = SWEEPS) -> Tensor:
    """Coordinate descent on ``tr((target - q) h (target - q)^T)`` over the kept entries of ``q``; never raises it.

    Args:
        target, q: ``[N, K]`` float32.
        h: ``[K, K]`` float32, positive diagonal.
        mask: bool ``[N, K]``.
        scale: ``[N, K/16]`` float32: entries stay on that FP4 grid. None: any value.

    Returns:
        A new ``q``.
    """
    q, k, diagonal = q.clone(), q.shape[1], h.diagonal()
    for _ in range(sweeps):
        pull = (target - q) @ h
        for start in range(0, k, _BLOCK // 2):
            end = min(start + _BLOCK // 2, k)
            local, before = pull[:, start:end].clone(), q[:, start:end].clone()
            for c in range(start, end):
                best = q[:, c] + local[:, c - start] / diagonal[c]
                if scale is not None:
                    best = to_grid(best, scale[:, c // nvfp4.GROUP])
                best = best * mask[:, c]
                local -= (best - q[:, c])[:, None] * h[c, start:end]
                q[:, c] = best
            pull -= (q[:, start:end] - before) @ h[start:end]
    return q


def _checked(w: Tensor, hessian: Tensor) -> Tensor:
    k = w.shape[-1]
    if w.dim() != 2 or k % 32 or tuple(hessian.shape) != (k, k):
        raise ShapeError(
            "pruning with calibration data takes a matrix and the Hessian of its inputs",
            value=f"weight {tuple(w.shape)}, Hessian {tuple(hessian.shape)}",
            limit="[N, K] and [K, K] with K % 32 == 0",
            remedy="Pad K with zeros, as Sparse24Linear does.",
        )
    check_hessian(hessian)
    return hessian


def _fit_scales(w: Tensor, g: Tensor, scale_search: str, weight: Tensor) -> Tensor:
    """E4M3 codes uint8 ``[N, K/16]`` for ``w`` ``[N, K]``, zero where it is dropped."""
    return nvfp4.choose_scale_codes((w / g).unflatten(-1, (-1, nvfp4.GROUP)), scale_search, weight.float() if scale_search == "activation" else None)


def _pack(q: Tensor, mask: Tensor, codes: Tensor, g: Tensor) -> Sparse24Parts:
    scale = scale_values(codes, g).repeat_interleave(nvfp4.GROUP, dim=1)
    return Sparse24Parts(*compress(e2m1.pack(e2m1.encode(q / torch.where(scale > 0, scale, torch.ones_like(scale)))), mask), codes.view(nvfp4.SCALE_DTYPE), g)
