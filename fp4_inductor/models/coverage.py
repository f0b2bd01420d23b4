"""What became of a model's parameters: quantized, skipped and why, or not covered."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field, replace

from torch import nn

_WORST = 5
_KINDS = 12


@dataclass(frozen=True)
class LayerReport:
    """One quantized weight.

    Args:
        name: dotted module name.
        shape: ``(out_features, in_features)``; ``(experts, out, in)`` for expert weights.
        params: weights.
        bytes_before, bytes_after: weight and bias.
        relative_error: ``|W - dequantized| / |W|`` (Frobenius), or the root of the share of nonzero blocks that became zero
            if that is more; None if the original weight was never seen (after load).
        notes: e.g. that K was padded, or which other layers share this weight.
        format: ``"nvfp4"`` or ``"sparse24_nvfp4"``.
        bits_per_weight: of the codes, metadata and block scales.
        output_error: ``|X (W - Q)^T| / |X W^T|`` over calibration inputs X; None where they were not kept.
        kl: of an output head, where calibration was given: KL divergence of the logits that its rounding alone causes, in
            nats per token.
    """

    name: str
    shape: tuple[int, ...]
    params: int
    bytes_before: int
    bytes_after: int
    relative_error: float | None = None
    notes: tuple[str, ...] = ()
    format: str = "nvfp4"
    bits_per_weight: float = 4.5
    output_error: float | None = None
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
        kl: KL(dense model || this one) in nats per token on calibration batches; None if it was not measured.
        warnings: what a user must not overlook; printed first.
    """

    layers: list[LayerReport] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    uncovered: list[Skipped] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0
    config: str = ""
    notes: list[str] = field(default_factory=list)
    kl: float | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def params(self) -> int:
        """Weights now in FP4."""
        return sum(layer.params for layer in self.layers)

    @property
    def coverage(self) -> float:
        """Percent of the linear and expert weights outside the skip list that are now FP4 (100.0 if there are none)."""
        missed = sum(s.params for s in self.uncovered)
        return 100.0 * self.params / (self.params + missed) if self.params + missed else 100.0

    @property
    def bits_per_weight(self) -> float:
        """Mean bits of a quantized weight (codes, metadata, block scales)."""
        return sum(layer.params * layer.bits_per_weight for layer in self.layers) / self.params if self.params else 0.0

    def __str__(self) -> str:
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        rows = [f"  !! {warning}" for warning in self.warnings]
        rows += [
            f"fp4_inductor report{f' ({self.config})' if self.config else ''}",
            f"  quantized   {len(self.layers):6d} layers  {_count(self.params):>8} weights  {_bytes(sum(i.bytes_before for i in self.layers)):>9}"
            f" -> {_bytes(sum(i.bytes_after for i in self.layers))}",
            f"  whole model                                  {_bytes(self.bytes_before):>9} -> {_bytes(self.bytes_after)} ({ratio:.2f}x smaller)",
            f"  coverage    {self.coverage:6.2f} % of linear and expert weights outside the skip list",
        ]
        rows += _grouped("not covered", self.uncovered) + _grouped("kept in high precision", self.skipped)
        rows += self._formats()
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

    def _formats(self) -> list[str]:
        """Which layers have which format, where there is more than the dense one."""
        names: dict[str, list[LayerReport]] = defaultdict(list)
        for layer in self.layers:
            names[layer.format].append(layer)
        if set(names) <= {"nvfp4"}:
            return []
        rows = [f"  bits        {self.bits_per_weight:6.2f} a weight on average"]
        rows += [
            f"    {group[0].bits_per_weight} bits {name:15s} {len(group):4d} layers: {_kinds([i.name for i in group])}" for name, group in sorted(names.items())
        ]
        return rows + ([f"  KL          {self.kl:6.4f} nats a token from the dense model, on calibration batches"] if self.kl is not None else [])


_RECORDED: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


def recorded(model: nn.Module) -> Report | None:
    """What :func:`record` kept for ``model``, if anything."""
    return _RECORDED.get(model)


def record(model: nn.Module, value: Report) -> None:
    """Keep ``value`` as the report of ``model`` for as long as the model lives."""
    _RECORDED[model] = value


def add_notes(model: nn.Module, notes: list[str]) -> None:
    """Append to the notes of the report of ``model``, if it has one."""
    found = recorded(model)
    if found is not None and notes:
        record(model, replace(found, notes=[*found.notes, *notes]))


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


def _kinds(names: list[str]) -> str:
    """``"q_proj (30), down_proj (2)"``: how many layers of each last name."""
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name.rpartition(".")[2]] += 1
    return ", ".join(f"{name} ({n})" for name, n in sorted(counts.items(), key=lambda item: -item[1])[:_KINDS])


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
