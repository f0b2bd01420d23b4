"""Several layers whose weights are rows of one: which rows are whose, and which global scale a row has.

``rows``: the row at which each member begins, ascending from 0. Members without a global scale of their own are no members here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ShapeError


def spans(rows: Sequence[int], n: int) -> list[tuple[int, int]]:
    """``[(start, stop), ...]`` of the members of ``n`` rows."""
    return list(zip(rows, [*rows[1:], n], strict=True))


def check_rows(op: str, rows: Sequence[int], global_scale: Tensor, codes: Tensor) -> None:
    """Raise unless ``rows`` says where each of the global scales ``[S]`` begins in the weight whose ``codes`` are ``[N, ...]``."""
    n = codes.shape[0] if codes.dim() else 0
    ascending = all(a < b for a, b in spans(rows, n))
    if tuple(global_scale.shape) != (len(rows),) or rows[0] != 0 or not ascending:
        raise ShapeError(
            f"fp4.{op}: global scales and rows do not fit",
            value=f"global_scale {tuple(global_scale.shape)}, rows {list(rows)}, {n} rows in all",
            limit="global_scale [S] and S rows at which members begin: 0 first, strictly ascending, within the weight",
            remedy="fp4_inductor.pack_linear makes them from the members' sizes.",
        )


def first_scale(global_scale: Tensor, rows: Sequence[int] | None) -> Tensor:
    """One of them, for checks of a weight with one."""
    return global_scale.select(0, 0) if rows else global_scale


def members(packed: Sequence[Tensor], global_scale: Tensor, rows: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """``(*packed, global_scale)`` of each member, views."""
    n = packed[0].shape[0]
    return [(*(p.narrow(0, a, b - a) for p in packed), global_scale.select(0, i)) for i, (a, b) in enumerate(spans(rows, n))]


def dense(decode: Callable[..., Tensor], packed: Sequence[Tensor], global_scale: Tensor, rows: Sequence[int] | None, *rest: object) -> Tensor:
    """``[N, K]``: ``decode(*packed, global_scale, *rest)`` of each member, one behind the other."""
    if not rows:
        return decode(*packed, global_scale, *rest)
    return torch.cat([decode(*part, *rest) for part in members(packed, global_scale, rows)])


def row_scales(global_scale: Tensor, rows: Sequence[int], n: int) -> Tensor:
    """``[n]``: the global scale of every row."""
    return torch.cat([global_scale.select(0, i).expand(b - a) for i, (a, b) in enumerate(spans(rows, n))])
