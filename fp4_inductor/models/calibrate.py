"""E[x^2] of every input channel of every layer (and every expert), from a forward pass over calibration batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.pytree import tree_map_only
from .._torch.wide_products import wide_products
from ..errors import CalibrationError, list_names
from .calibrate_experts import ExpertsMeans, non_finite
from .plan import ExpertsTarget, Target
from .progress import bar

_CHUNK = 1 << 22  # activations squared at once
_KEPT, _KEPT_OF_A_BATCH = 512, 128  # inputs of an output head that its KL divergence is judged by


class Mean:
    """Streaming sum of squares per channel on the activation's device, in float64 where the device has it."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.rows = 0
        self.kept: list[Tensor] | None = None  # of an output head: some of its inputs

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        if self.kept is not None and sum(map(len, self.kept)) < _KEPT:
            self.kept.append(x[:: max(1, len(x) // _KEPT_OF_A_BATCH)].clone())
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        for part in x.split(max(1, _CHUNK // max(1, x.shape[-1]))):
            squares = part.float().square().sum(0).to(wide)
            self.sum = squares if self.sum is None else self.sum.to(squares.device) + squares
        self.rows += x.shape[0]

    def result(self) -> Tensor | None:
        return None if self.sum is None or not self.rows else (self.sum / self.rows).float()

    def inputs(self) -> Tensor | None:
        """``[<= 512, K]``, if any were kept."""
        return torch.cat(self.kept)[:_KEPT] if self.kept else None

    def check_finite(self) -> bool:
        return self.sum is None or bool(torch.isfinite(self.sum).all())


def statistics(
    model: nn.Module,
    targets: list[Target],
    batches: Iterable[Any] | None,
    *,
    strict: bool,
    progress: bool = False,
    experts: Sequence[ExpertsTarget] = (),
) -> dict[str, Any]:
    """Run ``batches`` through ``model`` and return each layer's :class:`Mean`, and the :class:`.calibrate_experts.ExpertsMeans` of experts.

    The model runs in eval mode without gradients, where it is; its mode is restored. Tensors of a batch are moved to
    the device of the model's first parameter.

    Args:
        targets, experts: the layers to watch.
        batches: see :class:`fp4_inductor.NVFP4Config`.
        strict: a layer that no batch reached is an error; otherwise its entry is None. A single expert that no token
            reached is none: see :mod:`.calibrate_experts`.

    Raises:
        CalibrationError: no batch, a batch of an unknown kind, the forward failed, or a layer was never reached.
        NonFiniteError: a layer met NaN or Inf; names the first in execution order.
    """
    linear = {t.name: Mean() for t in targets}
    routed = {t.name: ExpertsMeans(t) for t in experts}
    order: dict[str, None] = {}
    handles = []
    try:
        for t in targets:
            linear[t.name].kept = [] if t.head else None
            handles.append(t.module.register_forward_pre_hook(_watch(t.name, linear[t.name], order), with_kwargs=True))
        for e in experts:
            handles.append(e.module.register_forward_pre_hook(routed[e.name].hook(order), with_kwargs=True))
        with evaluating(model):
            for _ in feed(model, batches, progress):
                pass
    finally:
        for handle in handles:
            handle.remove()

    means: dict[str, Mean | ExpertsMeans] = {**linear, **routed}
    bad = [name for name in order if not means[name].check_finite()]
    if bad:
        raise non_finite(bad, len(order))
    missed = [name for name, m in means.items() if m.rows == 0]
    if missed and strict:
        raise CalibrationError(
            f"{len(missed)} of {len(means)} layers were not reached by the calibration batches",
            value=list_names(missed),
            limit="every layer to be quantized",
            remedy="Add batches that exercise them, ignore them, or pass strict=False (unweighted scales for them).",
        )
    return means


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, without gradients; every module's mode is restored. On a CPU without 16-bit products they are computed in float32."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), wide_products(model.parameters()):
            yield
    finally:
        for module, training in modes:
            module.training = training


def feed(model: nn.Module, batches: Iterable[Any] | None, progress: bool = False, desc: str = "calibrate") -> Iterator[tuple[dict[str, Any], Any]]:
    """Call ``model`` on each batch, moved to the device of its first parameter; yields ``(keyword arguments, output)``."""
    device = next((p.device for p in model.parameters()), None)
    count = 0
    for batch in bar(batches_of(batches), desc, "batch", progress):
        args, kwargs = _arguments(batch, count)
        if device is not None and device.type != "meta":
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
        try:
            output = model(*args, **kwargs)
        except Exception as error:
            raise CalibrationError(
                f"the model's forward failed on calibration batch {count}",
                value=f"{type(error).__name__}: {error}",
                limit="batches that the model's forward takes",
                remedy="Call the model on this batch without fp4_inductor: a tuple gives positional arguments, a mapping keywords.",
            ) from error
        yield kwargs, output
        count += 1
    if count == 0:
        raise CalibrationError(
            "calibration holds no batch (an exhausted generator?)", value=0, limit=">= 1 batch", remedy="Pass a list, or a fresh iterator for each call."
        )


def batches_of(batches: Any) -> Iterable[Any]:
    """``batches``, or CalibrationError if it is no iterable of batches."""
    if isinstance(batches, (Tensor, Mapping, str, bytes)) or not isinstance(batches, Iterable):
        raise CalibrationError(
            "calibration is an iterable of batches", value=type(batches).__name__, limit="[batch, ...]", remedy="Wrap a single batch in a list."
        )
    return batches


def _arguments(batch: Any, index: int) -> tuple[tuple, dict]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    raise CalibrationError(
        f"calibration batch {index} is of an unknown kind",
        value=type(batch).__name__,
        limit="a tensor, a tuple (positional) or a mapping (keywords)",
        remedy='Tokenize text first, e.g. tokenizer(text, return_tensors="pt").',
    )


def _watch(name: str, mean: Mean, order: dict[str, None]):
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and x.numel():
            order[name] = None
            mean.add(x)

    return hook
