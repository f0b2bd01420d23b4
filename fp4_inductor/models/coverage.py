"""What became of a model's parameters: quantized, skipped and why, or not covered."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field

from torch import nn

_WORST = 5


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer.

    Args:
        name: dotted module name.
        shape: ``(out_features, in_features)``.
        params: weights.
        bytes_before, bytes_after: weight and bias.
        relative_error: ``|W - dequantized| / |W|`` (Frobenius); None if the original weight was never seen (after load).
        notes: e.g. that K was padded, or which other layers share this weight.
        kl: of an output head, where calibration was given: KL divergence of the logits that its rounding alone causes, in
            nats per token.
    """

    name: str
    shape: tuple[int, int]
    params: int
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None
    notes: tuple[str, ...] = ()
    kl: float | None = None


@dataclass(frozen=True)
class Skipped:
    """Parameters left in high precision on purpose."""

    name: str
    params: int
    reason: str


@dataclass(frozen=True)
class Report:
    """The state of one model after :func:`fp4_inductor.quantize_model` or :func:`fp4_inductor.load`.

    Args:
        layers: the quantized layers.
        skipped: what stays in high precision on purpose (default skip list, ``ignore``, tied, not a matrix).
        uncovered: linear and expert weights that should be FP4 and are not (``strict=False``).
        bytes_before, bytes_after: all parameters and buffers of the model, shared ones once.
        config: the options used, as text; empty after load.
        notes: remarks on the whole call, e.g. an ``ignore`` entry that matched nothing.
    """

    layers: list[LayerReport] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    uncovered: list[Skipped] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    config: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def params(self) -> int:
        """Weights now in FP4."""
        return sum(layer.params for layer in self.layers)

    @property
    def coverage(self) -> float:
        """Percent of the linear and expert weights outside the skip list that are now FP4 (100.0 if there are none)."""
        missed = sum(s.params for s in self.uncovered)
        return 100.0 * self.params / (self.params + missed) if self.params + missed else 100.0

    def __str__(self) -> str:
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        rows = [
            f"fp4_inductor report{f' ({self.config})' if self.config else ''}",
            f"  quantized   {len(self.layers):6d} layers  {_count(self.params):>8} weights  {_bytes(sum(i.bytes_before for i in self.layers)):>9}"
            f" -> {_bytes(sum(i.bytes_after for i in self.layers))}",
            f"  whole model                                  {_bytes(self.bytes_before):>9} -> {_bytes(self.bytes_after)} ({ratio:.2f}x smaller)",
            f"  coverage    {self.coverage:6.2f} % of linear and expert weights outside the skip list",
        ]
        rows += _grouped("not covered", self.uncovered) + _grouped("kept in high precision", self.skipped)
        known = sorted((i for i in self.layers if i.relative_error is not None), key=lambda i: -(i.relative_error or 0.0))
        if known:
            rows.append("  largest relative errors")
            rows += [f"    {i.relative_error:.4f}  {i.name} {list(i.shape)}" for i in known[:_WORST]]
        rows += [
            f"  output head {i.name}: relative error {i.relative_error:.4f}, KL {i.kl:.2e} nats per calibration token"
            for i in self.layers
            if i.kl is not None and i.relative_error is not None
        ]
        noted: dict[str, list[str]] = defaultdict(list)
        for layer in self.layers:
            for note in layer.notes:
                noted[note].append(layer.name)
        rows += [f"  note: {note}: {_some(names)}" for note, names in noted.items()]
        return "\n".join(rows + [f"  note: {note}" for note in self.notes])


_RECORDED: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def recorded(model: nn.Module) -> Report | None:
    """What :func:`record` kept for ``model``, if anything."""
    return _RECORDED.get(model)


def record(model: nn.Module, value: Report) -> None:
    """Keep ``value`` as the report of ``model`` for as long as the model lives."""
    _RECORDED[model] = value


def _grouped(title: str, items: list[Skipped]) -> list[str]:
    groups: dict[str, list[Skipped]] = defaultdict(list)
    for item in items:
        groups[item.reason].append(item)
    rows = [f"  {title}"] if items else []
    for reason, group in sorted(groups.items(), key=lambda g: -sum(i.params for i in g[1])):
        rows.append(f"    {_count(sum(i.params for i in group)):>8} in {len(group):3d}: {reason}: {_some([i.name for i in group])}")
    return rows


def _some(names: list[str], limit: int = 3) -> str:
    return ", ".join(names[:limit]) + (f", ... ({len(names) - limit} more)" if len(names) > limit else "")


def _count(n: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return str(n)


def _bytes(n: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
