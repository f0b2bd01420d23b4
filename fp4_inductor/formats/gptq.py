"""GPTQ for NVFP4: a weight rounded so that the outputs of its layer change least, each token counted by how much it matters.

For inputs X with token weights v the squared output error of a candidate Q is ``tr((W - Q) H (W - Q)^T)`` with
``H = X^T diag(v) X / rows``. :func:`quantize` lowers it in two steps, with the codes and scales of :mod:`.nvfp4` and nothing else:

* rounding, 16 columns at a time: what it does to one column is made good by the columns that are not yet rounded. Each of 15 block
  scales is tried by rounding the 16 columns with it, feedback included, so a scale is judged by what is left after compensation.
  Source: Frantar et al., "GPTQ" (2023); the loop over scales is ours.
* refinement: coordinate descent over the codes of a block and its scale, block after block, which lowers the error at every step.

Errors of two rows of Q add up where the model's output depends on both outputs together: with the gradients' second moment G at the output the error is
``tr(G (W - Q) H (W - Q)^T)``. Then rows are rounded in a few groups, one behind the other, and each makes good what the groups before it did. Source: Tseng et
al., "Model-Preserving Adaptive Rounding" (2025), whose two-sided feedback this is, by groups of rows.

Weights of the tokens: with all tokens alike the largest inputs, probably those of a text's first tokens, count most and matter little for
the output. On SmolLM2-135M (``benchmarks/quality_gptq.py``, 2,048 tokens of a manual / of a novel) KL is 0.048 / 0.073 with Fisher weights
and 0.056 / 0.076 without. With little damping the difference is larger: in the experiments behind this (8,192 tokens of its own text, damping
0.01) it was 0.073 / 0.084 against 0.096 / 0.114, where ``scale_search="activation"`` cost 0.084 / 0.106.

The loops over columns come as :class:`Panels`: here in torch operators, which run on every device, and the same bits in C for a CPU and in
Triton for a GPU (``kernels/quantize/gptq.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ShapeError
from . import e2m1, nvfp4, sparse24
from .hessian import check_hessian, damped, inverse_factor
from .nvfp4 import scale_values, to_grid
from .sparse24 import Sparse24Parts

# Of the mean of H's diagonal, and of each entry itself, added to the diagonal. Far more than the usual 0.01, and the second part shrinks
# correlations between channels: KL 0.073 / 0.084 with 0.01, 0.067 / 0.078 with 0.1, 0.065 / 0.075 with both, in those experiments.
DAMPING, DAMPING_OWN = 0.1, 0.3
# Of the refinement over all blocks, at most. SmolLM2-135M, KL on 6,144 tokens of a manual and of a novel: one sweep 0.0478 and 0.0569, two 0.0479 and 0.0569,
# four 0.0471 and 0.0564; of what four take from the squared error one takes 0.7 and two 0.9.
SWEEPS = 2
# The same of G, whose correlations are known less well, and into how many groups rows are divided. SmolLM2-135M, KL on 2,048 tokens of a manual and of a
# novel, 16,384 tokens of own text: rows one by one 0.0492 and 0.0650; groups of 32 rows with 0.1 and 0.3 0.0459 and 0.0619, with 0.3 and 1 0.0439 and 0.0602;
# 16 groups with 1 and 1 0.0431 and 0.0599; four groups, the largest rows in all of them, 0.0451 and 0.0642. G of rank 256, 8 groups: 0.0456 and 0.0607; of rank
# 64, 16 groups, 0.3 and 1: 0.0458 and 0.0626. On 6,144 tokens, two sweeps: 16 groups 0.0479 and 0.0569, 8 groups 0.0484 and 0.0566, in four fifths of the time.
OUTPUT_DAMPING, OUTPUT_DAMPING_OWN = 1.0, 1.0
ROW_GROUPS, _LEAST_ROWS = 8, 32
# The rest stands in csrc/cpu/gptq.c too, which has room for so many columns, and but for what is public in kernels/quantize/triton_gptq.py.
_CODES = range(-7, 8)  # scales tried for a block while rounding, and
_NEARBY = range(-2, 3)  # in the refinement: E4M3 codes around the present one
PASSES = 2  # over the 16 codes of a block for each scale of the refinement
_PANEL = 128  # columns whose effect on all others is one matrix product
GAIN = 1e-6  # of the squared change that is taken back and put in: less is float32 rounding
_FIRST, _LAST = 1, nvfp4.SCALE_MAX_BYTE


Outputs = Tensor | Callable[[], Tensor]  # second moments of gradients at a layer's output, or what makes them


class Panels(NamedTuple):
    """The two loops over columns, for weights on one device. Both work on contiguous float32 of P columns, a multiple of 16.

    Both take ``keep`` last: None, or contiguous bool ``[N, P]``, False where ``q`` stays zero.

    Args:
        rounded: ``(w [N, P], u [P, P], g [], keep)`` -> ``(q [N, P], codes uint8 [N, P/16], error [N, P])``. ``u``: the diagonal block of the
            upper Cholesky factor of H's inverse.
        refined: ``(pull [N, P], q [N, P], codes [N, P/16], h [P, P], g [], keep)`` -> ``change [N, P]``, what was added to ``q``, which is
            written as ``codes`` is. ``pull``: ``(W - Q) H`` of these columns. ``h``: the diagonal block of H.
    """

    rounded: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
    refined: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def quantize(
    w: Tensor, hessian: Tensor, global_scale: Tensor | None = None, panels: Panels | None = None, outputs: Outputs | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``w`` in NVFP4 with the least error of ``x @ w.T`` over the inputs behind ``hessian``.

    Args:
        w: ``[N, K]`` bfloat16, float16 or float32, finite; K a multiple of 16.
        hessian: ``[K, K]`` float32 on the same device, a weighted mean of ``x^T x``. A channel that no input excited (zero diagonal) and a
            singular matrix are served: the damping gives them an importance.
        global_scale: float32 ``[]``, multiplying; None: ``amax / (6 * 256)``, as of every search that may scale up.
        panels: the loops over columns; None: those in torch operators.
        outputs: ``[N, N]``, a sum of ``g^T g`` over gradients at the output, positive semi-definite, or a function that makes one, which is then
            called when it is needed, and whose result is used up; None: rows are independent.

    Returns:
        ``(qdata uint8 [N, K/2], scale float8_e4m3fn [N, K/16], global_scale float32 [])``, as :func:`.nvfp4.quantize`.

    Raises:
        DTypeError, ShapeError, DeviceError, NonFiniteError.
    """
    g, _ = nvfp4.checked_options(w, "mse", global_scale, None)
    _check(w, hessian)
    if isinstance(outputs, Tensor):
        _check_outputs(w, outputs)
    if not w.numel():
        return nvfp4.quantize(w, "mse", global_scale)
    qdata, codes = _coded(w.float(), hessian, g, panels or TORCH, outputs=outputs)
    return qdata, codes.view(nvfp4.SCALE_DTYPE), g.clone()


def quantize_sparse24(w: Tensor, hessian: Tensor, start: Sparse24Parts, panels: Panels | None = None) -> Sparse24Parts:
    """As :func:`quantize`, 2:4-sparse with the pattern of ``start``: what is dropped is made good by what is kept, as what is rounded away is.

    Each row is the better of two: rounded anew, and ``start`` after the refinement. So none has more error than ``start``.

    Args:
        w: K a multiple of 32.
        start: what a pruner made of ``w``; its global scale is kept.

    Raises:
        As :func:`quantize`.
    """
    sparse24.check_weight(w)
    nvfp4.check_finite(w)
    _check(w, hessian)
    if not w.numel():
        return start
    qdata, codes = _coded(w.float(), hessian, start.global_scale, panels or TORCH, start)
    return Sparse24Parts(*sparse24.compress(qdata, sparse24.mask_of(start.meta)), codes.view(nvfp4.SCALE_DTYPE), start.global_scale.clone())


def _check(w: Tensor, moments: Tensor, remedy: str = "hessian is X^T X over the layer's inputs X [rows, K].") -> None:
    k = w.shape[-1]
    if w.dim() != 2 or tuple(moments.shape) != (k, k) or moments.device != w.device:
        raise ShapeError(
            "GPTQ takes a matrix and the second moments of its inputs, and of its outputs' gradients",
            value=f"weight {tuple(w.shape)} on {w.device}, moments {tuple(moments.shape)} on {moments.device}",
            limit="[N, K], and [K, K] or [N, N] on one device",
            remedy=remedy,
        )
    check_hessian(moments)


def _check_outputs(w: Tensor, outputs: Tensor) -> None:
    _check(w.T, outputs, "outputs is G^T G over gradients G [rows, N] at the layer's output.")


def _coded(w: Tensor, hessian: Tensor, g: Tensor, panels: Panels, start: Sparse24Parts | None = None, outputs: Outputs | None = None) -> tuple[Tensor, Tensor]:
    """``(qdata uint8 [N, K/2], E4M3 codes uint8 [N, K/16])`` of ``w`` float32; of a sparse weight that is ``start`` before."""
    order, blocks = block_order(hessian)
    keep = None if start is None else sparse24.mask_of(start.meta)[:, order]
    h = damped(hessian[order[:, None], order], DAMPING, DAMPING_OWN)
    target, factor = w[:, order], inverse_factor(h)

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        q, codes = _round(rows, factor, g, keep, panels)
        return _refine(rows, h, q, codes, g, keep, panels)

    q, codes = rounded(target) if outputs is None else _rows_in_turn(target, outputs, rounded)
    if start is not None:
        other = sparse24.dequantize_sparse24(*start, dtype=torch.float32)[:, order]
        other, other_codes = _refine(target, h, other, start.scale.view(torch.uint8)[:, blocks], g, keep, panels)
        better = (objective(target, other, h) < objective(target, q, h))[:, None]
        q, codes = torch.where(better, other, q), torch.where(better, other_codes, codes)
    codes = codes[:, blocks.argsort()].contiguous()
    q = q[:, order.argsort()].unflatten(-1, (-1, nvfp4.GROUP))
    scale = scale_values(codes, g).unsqueeze(-1)
    return e2m1.pack(e2m1.encode(q / torch.where(scale > 0, scale, torch.ones_like(scale))).flatten(-2)), codes


def _rows_in_turn(target: Tensor, outputs: Outputs, rounded: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """``(q, codes)`` of all rows, in groups: what ``rounded`` does to one group is made good by those that are not yet rounded."""
    if isinstance(outputs, Tensor):
        m = damped(outputs, OUTPUT_DAMPING, OUTPUT_DAMPING_OWN)
    else:
        m = outputs()
        _check_outputs(target, m)
        m = damped(m, OUTPUT_DAMPING, OUTPUT_DAMPING_OWN, keep=False)
    order = m.diagonal().argsort(descending=True, stable=True)  # those that come first are compensated best
    factor = inverse_factor(m[order[:, None], order])
    del m
    rest = target[order]
    q, codes = torch.empty_like(rest), torch.empty(rest.shape[0], rest.shape[1] // nvfp4.GROUP, dtype=torch.uint8, device=rest.device)
    each = max(_LEAST_ROWS, -(-rest.shape[0] // ROW_GROUPS))
    for first in range(0, rest.shape[0], each):
        rows, behind = slice(first, first + each), slice(first + each, None)
        q[rows], codes[rows] = rounded(rest[rows].contiguous())
        error = torch.linalg.solve_triangular(factor[rows, rows].T, rest[rows] - q[rows], upper=False)
        rest[behind] -= factor[rows, behind].T @ error
    back = order.argsort()
    return q[back], codes[back]


def block_order(h: Tensor) -> tuple[Tensor, Tensor]:
    """``(columns int64 [K], blocks int64 [K/16])`` from the most to the least excited block of 16, for those that come first are compensated best."""
    blocks = h.diagonal().unflatten(0, (-1, nvfp4.GROUP)).sum(-1).argsort(descending=True, stable=True)
    inside = torch.arange(nvfp4.GROUP, device=h.device)
    return (blocks[:, None] * nvfp4.GROUP + inside).flatten(), blocks


def objective(w: Tensor, q: Tensor, h: Tensor) -> Tensor:
    """float64 ``[N]``: ``(w - q) h (w - q)^T`` of each row."""
    d = w.double() - q.double()
    return ((d @ h.double()) * d).sum(-1)


def _round(target: Tensor, factor: Tensor, g: Tensor, keep: Tensor | None, panels: Panels) -> tuple[Tensor, Tensor]:
    rest, q = target.clone(), torch.empty_like(target)
    codes = torch.empty(target.shape[0], target.shape[1] // nvfp4.GROUP, dtype=torch.uint8, device=target.device)
    for columns in _panels(target.shape[1]):
        found, code, error = panels.rounded(rest[:, columns].contiguous(), factor[columns, columns].contiguous(), g, _part(keep, columns))
        q[:, columns], codes[:, _blocks(columns)] = found, code
        rest[:, columns.stop :] -= error @ factor[columns, columns.stop :]
    return q, codes


def _refine(target: Tensor, h: Tensor, q: Tensor, codes: Tensor, g: Tensor, keep: Tensor | None = None, panels: Panels | None = None) -> tuple[Tensor, Tensor]:
    panels = panels or TORCH
    # In h's precision: a difference that is small beside its terms.
    pull = ((target - q).to(h.dtype) @ h).float()
    h = h.float()
    for _ in range(SWEEPS):
        moved = torch.zeros((), dtype=torch.bool, device=q.device)
        for columns in _panels(target.shape[1]):
            now, code = q[:, columns].contiguous(), codes[:, _blocks(columns)].contiguous()
            change = panels.refined(pull[:, columns].contiguous(), now, code, h[columns, columns].contiguous(), g, _part(keep, columns))
            moved |= change.any()
            q[:, columns], codes[:, _blocks(columns)] = now, code
            pull -= change @ h[columns]
        if not bool(moved):  # asked once a sweep: a GPU that is asked after every panel waits for the next one to be launched
            break
    return q, codes


def _panels(k: int) -> list[slice]:
    return [slice(start, min(start + _PANEL, k)) for start in range(0, k, _PANEL)]


def _part(keep: Tensor | None, columns: slice) -> Tensor | None:
    return None if keep is None else keep[:, columns].contiguous()


def _blocks(columns: slice) -> slice:
    return slice(columns.start // nvfp4.GROUP, columns.stop // nvfp4.GROUP)


# --- the loops over columns, in torch operators -------------------------------------------------------------------

# Products and sums are operators of their own, so that each is rounded as in C, where the compiler may not fuse them.


def _rounded(w: Tensor, u: Tensor, g: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    w, q, error = w.clone(), torch.empty_like(w), torch.empty_like(w)
    codes = torch.empty(w.shape[0], w.shape[1] // nvfp4.GROUP, dtype=torch.uint8, device=w.device)
    inverse = u.diagonal().reciprocal()
    for start in range(0, w.shape[1], nvfp4.GROUP):
        block = slice(start, start + nvfp4.GROUP)
        kept = None if keep is None else keep[:, block]
        code = _best_scale(w[:, block], u[block, block], inverse[block], g, kept)
        codes[:, start // nvfp4.GROUP] = code
        scale = scale_values(code, g)
        for c in range(start, start + nvfp4.GROUP):
            q[:, c] = _only(to_grid(w[:, c], scale), None if keep is None else keep[:, c])
            error[:, c] = (w[:, c] - q[:, c]) * inverse[c]
            w[:, c + 1 :] -= error[:, c, None] * u[c, c + 1 :]
    return q, codes, error


def _best_scale(w: Tensor, u: Tensor, inverse: Tensor, g: Tensor, keep: Tensor | None) -> Tensor:
    """uint8 ``[N]``: the code whose rounding of the block ``w [N, 16]``, feedback included, costs least; the smallest of equals."""
    base = nvfp4.to_code(_only(w, keep).abs().amax(-1) / (g * e2m1.MAX))
    tried = _neighbours(base, _CODES).clamp(_FIRST, _LAST)
    tried = torch.where(base[:, None] > 0, tried, torch.zeros_like(tried))
    scale = scale_values(tried.to(torch.uint8), g)
    rest = w[:, None].repeat(1, len(_CODES), 1)
    cost = torch.zeros_like(scale)
    for c in range(nvfp4.GROUP):
        error = (rest[..., c] - _only(to_grid(rest[..., c], scale), None if keep is None else keep[:, c, None])) * inverse[c]
        cost += error * error
        rest[..., c + 1 :] -= error[..., None] * u[c, c + 1 :]
    return torch.where(cost == cost.amin(-1, keepdim=True), tried, torch.full_like(tried, _LAST)).amin(-1).to(torch.uint8)


def _refined(pull: Tensor, q: Tensor, codes: Tensor, h: Tensor, g: Tensor, keep: Tensor | None) -> Tensor:
    pull, change = pull.clone(), torch.zeros_like(q)
    inverse = h.diagonal().reciprocal()
    for start in range(0, q.shape[1], nvfp4.GROUP):
        block = slice(start, start + nvfp4.GROUP)
        kept = None if keep is None else keep[:, block]
        code, d = _descend(pull[:, block], q[:, block], codes[:, start // nvfp4.GROUP], h[block, block], inverse[block], g, kept)
        codes[:, start // nvfp4.GROUP] = code
        change[:, block] = d
        q[:, block] += d
        for c in range(start, start + nvfp4.GROUP):
            pull -= change[:, c, None] * h[c]
    return change


def _descend(pull: Tensor, q: Tensor, code: Tensor, h: Tensor, inverse: Tensor, g: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(code [N], change [N, 16])`` of one block: the best of the nearby scales, or no change where none lowers the error."""
    tried = _neighbours(code, _NEARBY)
    valid = (tried >= _FIRST) & (tried <= _LAST)
    scale = scale_values(torch.where(valid, tried, torch.ones_like(tried)).to(torch.uint8), g)
    pull = pull[:, None].repeat(1, len(_NEARBY), 1)
    d = torch.zeros_like(pull)
    gain, size = torch.zeros_like(scale), torch.zeros_like(scale)
    for _ in range(PASSES):
        for c in range(nvfp4.GROUP):
            now = q[:, None, c] + d[..., c]
            step = _only(to_grid(now + pull[..., c] * inverse[c], scale) - now, None if keep is None else keep[:, c, None])
            own = step * h[c, c]
            gain += step * (pull[..., c] * 2 - own)
            size += step * own
            d[..., c] += step
            pull -= step[..., None] * h[c]
    gain = torch.where(valid, gain - size * GAIN, torch.full_like(gain, -torch.inf))
    best = torch.where(gain == gain.amax(-1, keepdim=True), tried, torch.full_like(tried, 2 * _LAST)).amin(-1)
    at = (best - tried[:, 0])[:, None]
    better = gain.gather(1, at) > 0
    return torch.where(better[:, 0], best.to(torch.uint8), code), torch.where(better, d.gather(1, at[..., None].expand(-1, 1, nvfp4.GROUP))[:, 0], 0.0)


def _only(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else torch.where(keep, x, torch.zeros_like(x))


def _neighbours(code: Tensor, around: range) -> Tensor:
    """int64 ``[N, len(around)]``."""
    return code.long()[:, None] + torch.arange(around.start, around.stop, device=code.device)


TORCH = Panels(_rounded, _refined)
