"""Second moments of the inputs of linear layers: ``H = X^T X / rows``, each token with a weight of its own where there are such, and where
the best dense answer to changed inputs lies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..formats.hessian import damped
from .chain import input_of
from .expert_gradients import PairWeights
from .plan import ExpertsTarget, Target
from .routed import RoutedInputs

_ROWS = 1 << 14  # rows of X multiplied at once


class Weigh(Protocol):
    """The weights of the tokens of one batch."""

    def __call__(self, name: str, batch: int, inputs: list[Tensor]) -> list[Tensor]:
        """float32 ``[rows]`` for each call of the layer ``name``, which was fed with ``inputs``."""

    def pairs(self, name: str, batch: int, calls: int) -> list[PairWeights] | list[None]:
        """For each call of a module of experts; None: not known."""


@dataclass
class Moments:
    """Of one layer: ``hessian`` sums ``X^T diag(v) X`` of the inputs it now gets, v being 1 or the tokens' weights; ``cross`` sums
    ``X0^T diag(v) X``, X0 being what it got in the dense model."""

    hessian: Tensor | None = None
    cross: Tensor | None = None
    rows: int = 0

    def mean(self) -> Tensor | None:
        """``X^T X / rows``; None if no row was seen."""
        return self.hessian / self.rows if self.hessian is not None and self.rows else None

    def target(self, w: Tensor) -> Tensor:
        """The dense ``[N, K]`` float32 whose outputs on X are nearest to those of ``w`` on X0; ``w`` itself without ``cross``.

        The ridge term pulls towards ``w``, as the damping of the Hessian does, so that few rows do little.
        """
        if self.cross is None or self.hessian is None:
            return w.float()
        h = damped(self.hessian)
        ridge = h - self.hessian  # damping * mean diagonal * identity
        return torch.linalg.solve(h, w.to(h.dtype) @ (self.cross.to(h.dtype) + ridge), left=False).float()


def moments_of(x: Tensor, before: Tensor | None = None, weights: Tensor | None = None) -> Moments:
    """Of the inputs ``x [rows, K]``, which were ``before`` in the dense model; ``weights`` of the tokens, None: all 1."""
    if weights is not None:
        return Moments(_weighted(x, x, weights), None if before is None else _weighted(before, x, weights), x.shape[0])
    return Moments(_product({}, x, x), None if before is None else _product({}, before, x), x.shape[0])


class Watch:
    """Hooks that add up :class:`Moments` of some layers, and what modules of experts are fed with, while the model, or one block of it, runs.

    Args:
        targets: the layers and the modules of experts.
        twin: ``twin(target)`` is the same layer in an unchanged copy, run as often as the layers themselves.
        stop: end a run (:meth:`run`) as soon as every layer was reached; each runs once.
        weigh: the weights of the tokens; None: all 1.
    """

    def __init__(
        self,
        targets: Iterable[Target | ExpertsTarget],
        twin: Callable[[Target | ExpertsTarget], nn.Module] | None = None,
        stop: bool = False,
        weigh: Weigh | None = None,
    ):
        targets = list(targets)
        self._weigh, self._batch = weigh, 0
        self.moments = {t.name: Moments() for t in targets if isinstance(t, Target)}
        self.routed = {t.name: RoutedInputs(t, weigh is not None) for t in targets if isinstance(t, ExpertsTarget)}
        self._seen: dict[str, list] = {}
        self._dense: dict[str, list] = {}
        count = len(targets) if stop else 0
        self._handles = [t.module.register_forward_pre_hook(_keep(self._seen, t, count), with_kwargs=True) for t in targets]
        if twin is not None:
            self._handles += [twin(t).register_forward_pre_hook(_keep(self._dense, t, count), with_kwargs=True) for t in targets]

    def found(self, name: str) -> Moments | RoutedInputs:
        """What is known of the target ``name``."""
        return self.routed[name] if name in self.routed else self.moments[name]

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """``call(*args)``, or None if this watch ends it early."""
        with contextlib.suppress(_ReachedError):
            return call(*args)

    def add(self) -> None:
        """Take in what the layers were fed since the last call, which was one batch. Layers fed with one tensor share one product."""
        products: dict[tuple[int, ...], Tensor] = {}
        for name, inputs in self._seen.items():
            before = self._dense.get(name, [])
            if name in self.routed:
                pairs = [None] * len(inputs) if self._weigh is None else self._weigh.pairs(name, self._batch, len(inputs))
                for i, values in enumerate(inputs):
                    alike = len(before) == len(inputs) and before[i][0].shape == values[0].shape
                    self.routed[name].add(values, before[i] if alike else None, pairs[i])
                continue
            moments = self.moments[name]
            weights = None if self._weigh is None else self._weigh(name, self._batch, inputs)
            for i, x in enumerate(inputs):
                moments.rows += x.shape[:-1].numel()
                moments.hessian = _plus(moments.hessian, _product(products, x, x) if weights is None else _weighted(x, x, weights[i]))
                if len(before) == len(inputs) and before[i].shape == x.shape:
                    product = _product(products, before[i], x) if weights is None else _weighted(before[i], x, weights[i])
                    moments.cross = _plus(moments.cross, product)
        self._seen.clear()
        self._dense.clear()
        self._batch += 1

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _ReachedError(Exception):
    """Every layer that is watched has its input."""


def _keep(into: dict[str, list], target: Target | ExpertsTarget, count: int) -> Callable:
    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x = input_of(args, kwargs)
        if isinstance(x, Tensor) and x.numel():
            # Not a view of it: layers fed with one tensor are known by it.
            into.setdefault(target.name, []).append(x if isinstance(target, Target) else [*args, *kwargs.values()])
            if len(into) == count:
                raise _ReachedError

    return hook


def _plus(total: Tensor | None, product: Tensor) -> Tensor:
    return product.clone() if total is None else total.to(product.device).add_(product)


def _product(products: dict[tuple[int, ...], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """``a^T b`` over all rows, float32."""
    key = (id(a), id(b))
    if key not in products:
        left, right = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
        parts = zip(left.split(_ROWS), right.split(_ROWS), strict=True)
        total = None
        for p, q in parts:
            p = p.float()
            total = _plus(total, p.t() @ (p if a is b else q.float()))
        products[key] = total if total is not None else torch.zeros(a.shape[-1], b.shape[-1], device=a.device)
    return products[key]


def _weighted(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """``a^T diag(weights) b`` over all rows, float32."""
    left, right = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    total = None
    for p, q, v in zip(left.split(_ROWS), right.split(_ROWS), weights.to(b.device).split(_ROWS), strict=True):
        root = v.sqrt()[:, None]  # of both, so that the product of one with itself is symmetric
        scaled = q.float() * root
        total = _plus(total, (scaled if a is b else p.float() * root).t() @ scaled)
    return total if total is not None else torch.zeros(a.shape[-1], b.shape[-1], device=b.device)
