"""Which tensor on disk becomes which tensor of a model, by transformers' own conversion rules.

Transformers renames, stacks and joins what is on disk (``experts.0.w1.weight``, ... -> ``experts.gate_up_proj``). The same
rules run here on :class:`NVFP4Tensor`, whose stack and concatenation move codes and scales and change neither.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from ...checkpoint.readers import StoredWeight
from ...checkpoint.safetensors_file import Entry
from ...errors import CheckpointError, FP4Error, list_names

Source = StoredWeight | Entry
_OTHER_MODEL = "Use the config.json that came with the weights."
# llm-compressor writes the experts of Mixtral under the names that other models use.
_EXPERT = re.compile(r"(\.experts\.\d+\.)(gate|up|down)_proj\.")
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass
class Assembly:
    """One converter and everything on disk that goes into it; it makes one tensor of the model, or several.

    ``known``: the model's tensors before any layer was replaced, by name: some rules compare with their shapes.
    ``sources``: (name on disk, the converter's pattern that it matched, what is there).
    """

    target: str
    converter: WeightConverter | None
    known: Mapping[str, Tensor] = field(default_factory=dict)
    sources: list[tuple[str, str, Source]] = field(default_factory=list)

    @property
    def packed(self) -> bool:
        return _is_packed(self.sources[0][2])

    @property
    def weights(self) -> list[StoredWeight]:
        return [source for _, _, source in self.sources if isinstance(source, StoredWeight)]

    def make(self, model: PreTrainedModel, get: Callable[[Source], Tensor]) -> dict[str, Tensor]:
        """Model names -> tensors, from ``get(source)`` of everything on disk."""
        if self.converter is None:
            return {self.target: get(self.sources[0][2])}
        converter = copy.deepcopy(self.converter)
        for name, pattern, source in self.sources:
            converter.add_tensor(self.target, name, pattern, functools.partial(get, source))  # type: ignore[arg-type]
        made = converter.convert(self.target, model=cast(Any, _Unreplaced(model, self.known)), config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


class _Unreplaced:
    """A model whose ``get_parameter`` answers as it did before layers were replaced."""

    def __init__(self, model: PreTrainedModel, known: Mapping[str, Tensor]):
        self._model, self._known = model, known

    def get_parameter(self, name: str) -> Tensor:
        return self._known[name] if name in self._known else self._model.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def assemble(
    model: PreTrainedModel, weights: Mapping[str, StoredWeight], dense: Mapping[str, Entry], as_saved: bool = False
) -> tuple[list[Assembly], list[str]]:
    """Sort everything on disk by what it becomes.

    Args:
        model: on the meta device, before any layer is replaced.
        weights: quantized weights by dense name.
        dense: all other tensors by name.
        as_saved: the names and layouts on disk are the model's own (``save_pretrained`` here): a name that the model has is
            taken as it is, without a rule.

    Returns:
        The assemblies whose target the model has, and the names on disk that lead nowhere.
    """
    rules = get_model_conversion_mapping(model)
    renamings = [r for r in rules if isinstance(r, WeightRenaming)]
    converters = [r for r in rules if isinstance(r, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known = model.state_dict()
    prefix = model.base_model_prefix
    everything: dict[str, Source] = {**dense, **weights}

    apart = {} if as_saved else _experts_apart(everything, known, by_pattern)

    def target_of(name: str) -> tuple[str, WeightConverter | None, str | None] | None:
        if as_saved and name in known:
            return name, None, None
        for candidate in _spellings(name, by_pattern):
            renamed, pattern = rename_source_key(candidate, renamings, converters, prefix, known)
            if renamed in known:
                return renamed, None if pattern is None else by_pattern[pattern], pattern
        if apart:
            renamed, pattern = rename_source_key(name, renamings, list(apart.values()), prefix, known)
            if renamed in known and pattern is not None:
                return renamed, apart[pattern], pattern
        renamed, _ = rename_source_key(name, [], [], prefix, known)
        return (renamed, None, None) if renamed in known else None

    assemblies: dict[str, Assembly] = {}
    homeless: list[str] = []
    for name in sorted(everything, key=dot_natural_key):
        found = target_of(name)
        if found is None:
            homeless.append(name)
            continue
        target, converter, pattern = found
        item = assemblies.setdefault(target, Assembly(target, converter, known))
        if item.converter is not converter or (converter is None and item.sources):
            raise CheckpointError(f"{target} is stored twice", value=f"{item.sources[0][0]}, {name}", limit="one", remedy=_OTHER_MODEL)
        item.sources.append((name, pattern or name, everything[name]))
    for item in assemblies.values():
        if len({_is_packed(source) for _, _, source in item.sources}) > 1:
            kinds = {_is_packed(source): name for name, _, source in item.sources}
            raise CheckpointError(
                f"{item.target} is quantized in part only",
                value=f"quantized: {kinds[True]}; not: {kinds[False]}",
                limit="all of its experts, or none",
                remedy="Download the checkpoint again; if it was written so, quantize the original model.",
            )
    return list(assemblies.values()), homeless


def _experts_apart(everything: Mapping[str, Any], known: Mapping[str, Tensor], by_pattern: Mapping[str, Any]) -> dict[str, WeightConverter]:
    """Rules, by source pattern, for experts that are stored one by one although this architecture's dense checkpoints stack them.

    Quantizers write them so: no layout says what a stack ``[E, N, K]`` of packed weights is.
    """
    if not any(_ONE_EXPERT.search(name) for name in everything) or not any(name.endswith(".experts.gate_up_proj") for name in known):
        return {}
    if any(".experts.*." in pattern for pattern in by_pattern):
        return {}
    first = WeightConverter(
        source_patterns=["experts.*.gate_proj.weight", "experts.*.up_proj.weight"],
        target_patterns="experts.gate_up_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    )
    down = WeightConverter(source_patterns="experts.*.down_proj.weight", target_patterns="experts.down_proj", operations=[MergeModulelist(dim=0)])
    return {pattern: rule for rule in (first, down) for pattern in rule.source_patterns}


def _is_packed(source: Source) -> bool:
    return isinstance(source, StoredWeight) and source.packed


def shapes(item: Assembly, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """What ``item`` will make, on the meta device."""

    def stand_in(source: Source) -> Tensor:
        return source.like_meta(dtype) if isinstance(source, StoredWeight) else torch.empty(source.shape, dtype=source.dtype, device="meta")

    try:
        return item.make(model, stand_in)
    except FP4Error:
        raise
    except Exception as error:  # the rules are transformers' own code, and assume tensors that fit
        names = [name for name, _, _ in item.sources]
        raise CheckpointError(
            f"{item.target} cannot be put together from what is stored",
            value=f"{type(error).__name__}: {str(error)[:200]}; {len(names)} tensors, {_first_gap(names)}",
            limit="every expert complete, in one shape",
            remedy="Download the checkpoint again; if it was written so, quantize the original model.",
        ) from error


def _first_gap(names: Iterable[str]) -> str:
    """Which expert is missing, if the numbers in the names say so."""
    numbers: dict[str, set[int]] = {}
    for name in names:
        match = re.search(r"^(.*\.)(\d+)(\.[^.]+(?:\.weight)?)$", name)
        if match:
            numbers.setdefault(match[1] + "*" + match[3], set()).add(int(match[2]))
    largest = max((max(found) for found in numbers.values()), default=-1)
    gaps = [pattern.replace("*", str(i)) for pattern, found in numbers.items() for i in range(largest + 1) if i not in found]
    return f"without {list_names(gaps)}" if gaps else "none of them missing by number"


def _spellings(name: str, patterns: Mapping[str, Any]) -> list[str]:
    if name.endswith("_proj.bias"):
        # FP4Experts keep the bias with its weight; the module they replace has a Parameter of its own for it.
        return [name, f"{name.removesuffix('.bias')}_bias"]
    if any(".w1." in p for p in patterns) and _EXPERT.search(name):
        return [_EXPERT.sub(lambda m: f"{m[1]}{_MIXTRAL[m[2]]}.", name), name]
    return [name]
