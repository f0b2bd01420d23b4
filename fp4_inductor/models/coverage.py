"""What became of a model's parameters: quantized, skipped and why, or not covered."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field, replace

from torch import nn

from .._text import join_names, merge_alike, terminal_width, wrap

_WORST = 5
_KINDS = 12
_NAMED = 6  # groups of names beside one reason


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
        predicted_kl: KL divergence from the dense model that the rounding of this layer alone causes, in nats per token, as one backward pass
            predicts it; of a module of experts that of both weights, on the row of the first. Where ``scale_search="gptq"`` was taken
            for a model that writes text, else None.
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
    predicted_kl: float | None = None


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
        kl: KL(dense model || this one) in nats per token on calibration batches, or on text of the model's own that was held out from
            calibration; None if it was not measured.
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
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The report in lines of at most ``width`` columns; None: those of the terminal, 80 if the output is none.

        Repeated layers are grouped: ``model.layers.0-47.mlp.{up_proj,down_proj}`` are 96 layers. ``layers``, ``skipped`` and
        ``uncovered`` have each of them.
        """
        width = terminal_width() if width is None else width
        ratio = self.bytes_before / self.bytes_after if self.bytes_after else 1.0
        rows = [_Row("  !! ", warning) for warning in merge_alike(self.warnings)]
        rows += [
            _Row("", f"fp4_inductor report{f' ({self.config})' if self.config else ''}"),
            _Row(
                f"  quantized   {len(self.layers):5d} layers  {_count(self.params):>7} weights {_bytes(sum(i.bytes_before for i in self.layers)):>8}"
                f" -> {_bytes(sum(i.bytes_after for i in self.layers))}",
            ),
            _Row(f"  whole model {'':29}{_bytes(self.bytes_before):>8} -> {_bytes(self.bytes_after)} ", f"({ratio:.2f}x smaller)"),
            _Row(f"  coverage   {self.coverage:6.2f} % ", "of linear and expert weights outside the skip list"),
        ]
        rows += _grouped("not covered", self.uncovered) + _grouped("kept in high precision", self.skipped)
        rows += self._formats()
        known = sorted((i for i in self.layers if i.relative_error is not None), key=lambda i: -(i.relative_error or 0.0))
        if known:
            rows.append(_Row("  largest relative errors"))
            rows += [_Row(f"    {i.relative_error:.4f}  ", f"{i.name} {list(i.shape)}") for i in known[:_WORST]]
        predicted = sorted(((i.predicted_kl, i.name) for i in self.layers if i.predicted_kl is not None), reverse=True)
        if predicted:
            total = sum(kl for kl, _ in predicted)
            rows.append(_Row("  largest shares of the KL", f", each layer alone, predicted: {total:.4f} nats a token in all"))
            rows += [_Row(f"    {100 * kl / total if total else 0.0:4.1f}%  {kl:.5f}  ", name) for kl, name in predicted[:_WORST]]
        rows += [
            _Row("  output head ", f"{i.name}: relative error {i.relative_error:.4f}, KL {i.kl:.2e} nats per calibration token")
            for i in self.layers
            if i.kl is not None and i.relative_error is not None
        ]
        noted: dict[str, list[str]] = defaultdict(list)
        for layer in self.layers:
            for note in layer.notes:
                noted[note].append(layer.name)
        notes = [f"{note}: {join_names([n for s in same for n in noted[s]], _NAMED)}" for note, same in merge_alike(noted).items()] + self.notes
        rows += [_Row("  note: ", note) for note in notes]
        return "\n".join(line for row in rows for line in row.lines(width))

    def _formats(self) -> list[_Row]:
        """Which layers have which format, if there is more than the dense one."""
        groups: dict[str, list[LayerReport]] = defaultdict(list)
        for layer in self.layers:
            groups[layer.format].append(layer)
        if set(groups) <= {"nvfp4"}:
            return []
        rows = [_Row(f"  bits        {self.bits_per_weight:6.2f} a weight on average")]
        for name, group in sorted(groups.items()):
            rows.append(_Row(f"    {group[0].bits_per_weight} bits {name:15s} {len(group):4d} layers: ", _kinds([i.name for i in group])))
        kl = f"  KL          {self.kl:6.4f} " if self.kl is not None else ""
        return [*rows, *([_Row(kl, "nats a token from the dense model, on calibration batches")] if kl else [])]


@dataclass(frozen=True)
class _Row:
    """One statement of a report: how its first line begins, figures in their columns; the text after that, which is wrapped; columns before its other lines."""

    head: str
    text: str = ""
    margin: int = 8

    def lines(self, width: int) -> list[str]:
        return wrap(self.text, width, self.head, " " * self.margin)


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


def _grouped(title: str, items: list[Skipped]) -> list[_Row]:
    by_reason: dict[str, list[Skipped]] = defaultdict(list)
    for item in items:
        by_reason[item.reason].append(item)
    groups = {reason: [item for s in same for item in by_reason[s]] for reason, same in merge_alike(by_reason).items()}
    rows = [_Row(f"  {title}")] if items else []
    for reason, group in sorted(groups.items(), key=lambda g: -sum(i.params for i in g[1])):
        head = f"    {_count(sum(i.params for i in group)):>8} in {len(group):3d}: "
        rows.append(_Row(head, f"{reason}: {join_names([i.name for i in group], _NAMED)}", 12))
    return rows


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
