"""E[x^2] of every input channel of every layer, from a forward pass over calibration batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch.pytree import tree_map_only
from ..errors import CalibrationError, NonFiniteError
from .plan import Target
from .progress import bar

_CHUNK = 1 << 22  # activations squared at once
_KEPT, _KEPT_OF_A_BATCH = 512, 128  # inputs of an output head that its KL divergence is judged by


class _Mean:
    """Streaming sum of squares per channel on the activation's device, in float64 where the device has it."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.rows = 0
        self.kept: list[Tensor] | None = None

    def add(self, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        if self.kept is not None and sum(map(len, self.kept)) < _KEPT:
            self.kept.append(x[:: max(1, len(x) // _KEPT_OF_A_BATCH)].clone())
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        for part in x.split(max(1, _CHUNK // max(1, x.shape[-1]))):
            squares = part.float().square().sum(0).to(wide)
            self.sum = squares if self.sum is None else self.sum.to(squares.device) + squares
        self.rows += x.shape[0]


def mean_squares(
    model: nn.Module, targets: list[Target], batches: Iterable[Any] | None, *, strict: bool, progress: bool = False, keep: dict[str, Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Run ``batches`` through ``model`` and return ``{layer name: [K] float32 E[x^2]}``.

    The model runs in eval mode without gradients, where it is; its mode is restored. Tensors of a batch are moved to
    the device of the model's first parameter.

    Args:
        targets: the layers to watch.
        batches: see :class:`fp4_inductor.NVFP4Config`.
        strict: a layer that no batch reached is an error; otherwise its entry is None.
        keep: gets ``{name: [<= 512, K]}``, some of the inputs of each output head among the targets.

    Raises:
        CalibrationError: no batch, a batch of an unknown kind, the forward failed, or a layer was never reached.
        NonFiniteError: a layer met NaN or Inf; names the first in execution order.
    """
    means = {t.name: _Mean() for t in targets}
    order: dict[str, None] = {}
    handles = []
    modes = [(m, m.training) for m in model.modules()]
    device = next((p.device for p in model.parameters()), None)
    try:
        for t in targets:
            mean = means[t.name]
            mean.kept = [] if t.head and keep is not None else None
            handles.append(t.module.register_forward_pre_hook(_watch(t.name, mean, order), with_kwargs=True))
        model.eval()
        _feed(model, batches, device, progress)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training

    _check_finite(order, means)
    missed = [t.name for t in targets if means[t.name].rows == 0]
    if missed and strict:
        raise CalibrationError(
            f"{len(missed)} of {len(targets)} layers were not reached by the calibration batches",
            value=", ".join(missed[:20]) + (" ..." if len(missed) > 20 else ""),
            limit="every layer to be quantized",
            remedy="Add batches that exercise them, ignore them, or pass strict=False (unweighted scales for them).",
        )
    if keep is not None:
        keep |= {name: torch.cat(m.kept)[:_KEPT] for name, m in means.items() if m.kept}
    return {name: None if m.sum is None or not m.rows else (m.sum / m.rows).float() for name, m in means.items()}


def _feed(model: nn.Module, batches: Iterable[Any] | None, device: torch.device | None, progress: bool) -> None:
    count = 0
    with torch.no_grad():
        for batch in bar(_iterate(batches), "calibrate", "batch", progress):
            args, kwargs = _arguments(batch, count)
            if device is not None and device.type != "meta":
                args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), (args, kwargs))
            try:
                model(*args, **kwargs)
            except Exception as error:
                raise CalibrationError(
                    f"the model's forward failed on calibration batch {count}",
                    value=f"{type(error).__name__}: {error}",
                    limit="batches that the model's forward takes",
                    remedy="Call the model on this batch without fp4_inductor: a tuple gives positional arguments, a mapping keywords.",
                ) from error
            count += 1
    if count == 0:
        raise CalibrationError(
            "calibration holds no batch (an exhausted generator?)", value=0, limit=">= 1 batch", remedy="Pass a list, or a fresh iterator for each call."
        )


def _iterate(batches: Any) -> Iterable[Any]:
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


def _watch(name: str, mean: _Mean, order: dict[str, None]):
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and x.numel():
            order[name] = None
            mean.add(x)

    return hook


def _check_finite(order: dict[str, None], means: dict[str, _Mean]) -> None:
    reached = [(name, means[name].sum) for name in order]
    bad = [name for name, s in reached if s is not None and not bool(torch.isfinite(s).all())]
    if bad:
        raise NonFiniteError(
            f"calibration: the input of {bad[0]} holds NaN or Inf (or its squares overflow float32)",
            value=f"{len(bad)} of {len(reached)} layers affected, the first in execution order is {bad[0]}",
            limit="finite activations",
            remedy="Check the calibration batches, and the model in its dtype without quantization.",
        )
