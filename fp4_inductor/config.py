"""Frozen configuration objects. An unknown field is a TypeError from the dataclass; a bad value is a ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from .errors import ConfigError

ScaleSearch = Literal["amax", "four_over_six", "mse", "activation"]
LargeM = Literal["auto", "fp8", "bf16"]
Siblings = Literal["packed", "shared", "separate"]
Head = Literal["bf16", "nvfp4", "fp8"]


def _one_of(config: Any, name: str, literal: Any) -> None:
    value = getattr(config, name)
    if value not in get_args(literal):
        default = type(config).__dataclass_fields__[name].default
        raise ConfigError(
            f"{name} is not a known choice",
            value=repr(value),
            limit=list(get_args(literal)),
            remedy=f'Leave {name} out for the default, "{default}".',
        )


@dataclass(frozen=True)
class NVFP4Config:
    """How :func:`fp4_inductor.quantize_model` turns weights into NVFP4.

    Args:
        scale_search: how the E4M3 scale of each block of 16 weights is chosen.

            * ``"amax"``: ``amax / 6``, the plain rule.
            * ``"four_over_six"`` (default, needs no data): per block the better of ``amax/6`` and ``amax/4``
              by squared error (Cook et al., "Four Over Six", 2025).
            * ``"mse"``: the best of 15 neighbouring E4M3 codes by squared error.
            * ``"activation"``: the same sweep with each input channel weighted by E[x^2] over ``calibration``.
        calibration: for ``"activation"``: an iterable of batches. A batch is a tensor (passed as the only positional
            argument), a tuple (positional arguments) or a mapping (keyword arguments) of the model's forward.
        large_m: path for many rows (prefill). ``"fp8"``: dequantise to a transient FP8 weight and use the FP8 tensor
            cores, activations rounded to E4M3 per token. ``"bf16"``: transient weight in the activation's dtype.
            ``"auto"``: FP8 where the GPU has FP8 tensor cores and the activations are bfloat16, else bf16.
        siblings: layers of one module that usually read one input (q/k/v, gate/up). ``"packed"``: adjacent rows of one
            buffer, so that compiled graphs make one call of them; every bit is as if they were apart. ``"shared"``: one
            global scale besides, which lets every kernel take them in one call; block scales are rounded a little
            differently. ``"separate"``: as any other layer. Checkpoints stay per layer in any case.
        lm_head: the output head. ``"bf16"``: as it is (its error goes straight into the logits). ``"fp8"``: E4M3 with one
            scale per output, half the memory. ``"nvfp4"``: as the other layers, 28%. A head that is tied to the embedding
            gets a weight of its own then, and the embedding stays. The report has its relative error and, where
            ``calibration`` is given, the KL divergence that the head alone causes.
    """

    scale_search: ScaleSearch = "four_over_six"
    calibration: Iterable[Any] | None = field(default=None, repr=False, compare=False)
    large_m: LargeM = "auto"
    siblings: Siblings = "packed"
    lm_head: Head = "bf16"

    def __post_init__(self) -> None:
        _one_of(self, "scale_search", ScaleSearch)
        _one_of(self, "large_m", LargeM)
        _one_of(self, "siblings", Siblings)
        _one_of(self, "lm_head", Head)
        if self.scale_search == "activation" and self.calibration is None:
            raise ConfigError(
                'scale_search="activation" needs calibration data',
                value="calibration=None",
                limit="an iterable of batches",
                remedy='Pass calibration=[batch, ...] (a few thousand tokens), or use scale_search="four_over_six".',
            )


def _is_threshold(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int) and item[1] >= 0


@dataclass(frozen=True)
class DispatchConfig:
    """Overrides of the measured dispatch rows of ``kernels/table.py``.

    Args:
        thresholds: ``{regime: largest M}``, e.g. ``{"gemv": 1, "mid": 512}``; regimes are those of
            :data:`fp4_inductor.kernels.table.REGIMES`. A regime not named keeps its row.
        unproven: what a compiled graph does when M cannot be proven to lie in one regime: ``"guard"`` (one graph per
            regime, full fusion) or ``"runtime"`` (one graph, the op picks the kernel on the host at each call).
            Ahead-of-time compilation and unbacked symbols always use ``"runtime"``.
    """

    thresholds: tuple[tuple[str, int], ...] = ()
    unproven: Literal["guard", "runtime"] = "guard"

    def __post_init__(self) -> None:
        given = self.thresholds
        items = tuple(given.items()) if isinstance(given, dict) else tuple(given) if isinstance(given, (list, tuple)) else None
        if items is None or not all(_is_threshold(item) for item in items):
            raise ConfigError(
                "thresholds are not {regime: largest M}",
                value=repr(given),
                limit="names of regimes and integers >= 0",
                remedy='Write thresholds={"gemv": 1, "mid": 512}; 0 switches a regime off.',
            )
        object.__setattr__(self, "thresholds", tuple(sorted(items)))
        _one_of(self, "unproven", Literal["guard", "runtime"])


_dispatch = DispatchConfig()
# Called after the config in force has changed. The passes put it into torch's cache keys from here.
dispatch_observers: list[Callable[[], None]] = []


def dispatch_config() -> DispatchConfig:
    """The :class:`DispatchConfig` in force in this process."""
    return _dispatch


@contextmanager
def dispatch(**fields: Any):
    """Context manager: run with some fields of :class:`DispatchConfig` replaced.

    Artifacts in torch's compile caches are keyed by it. A graph already in memory keeps the config it was compiled under, as
    with torch's own configs; ``torch.compiler.reset()`` drops it.
    """
    old = _dispatch
    new = replace(old, **fields)
    _put_in_force(new)
    try:
        yield new
    finally:
        _put_in_force(old)


def _put_in_force(new: DispatchConfig) -> None:
    global _dispatch
    _dispatch = new
    for changed in dispatch_observers:
        changed()
