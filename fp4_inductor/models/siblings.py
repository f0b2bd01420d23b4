"""Which layers are packed into one weight: those of one parent that :attr:`Family.siblings` names together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..formats import nvfp4
from ..modules import FP4Linear, SiblingLinear, pack_siblings
from . import families
from .coverage import Report
from .plan import QuantizationPlan, Target, tensor_key
from .training import plain_name, trainable_bias

NOTE = "rows of one weight, one call where they read one input: {}"


def sets_of(names: Iterable[str]) -> list[list[str]]:
    """Sibling sets among dotted ``names``, each in its family's order."""
    parents: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        parent, _, last = plain_name(name).rpartition(".")  # PEFT's wrappers stand between a parent and its layers
        parents[parent][last] = name
    found = []
    for children in parents.values():
        for listed in (s for family in families() for s in family.siblings):
            together = [children.pop(last) for last in listed if last in children]
            if len(together) > 1:
                found.append(together)
    return found


def planned(model: nn.Module, plan: QuantizationPlan) -> list[list[Target]]:
    """The targets of ``plan`` that will be packed together.

    Left alone: a layer that shares its weight or its bias with another module (packing would give it a copy), one whose bias is
    trained by itself, and siblings that differ in K, dtype or device.
    """
    owners: dict[tuple, int] = defaultdict(int)
    for _, p in model.named_parameters(remove_duplicate=False):
        owners[tensor_key(p)] += 1

    def alone(t: Target) -> bool:
        return len(t.names) == 1 and trainable_bias(t.module) is None and all(owners[tensor_key(p)] == 1 for p in t.module.parameters(recurse=False))

    targets = {group[0].name: group[0] for group in plan.groups if len(group) == 1 and not group[0].head and alone(group[0])}
    found = []
    for names in sets_of(targets):
        kinds: dict[tuple, list[Target]] = defaultdict(list)
        for t in map(targets.__getitem__, names):
            weight = t.module.get_parameter("weight")
            kinds[weight.shape[0 if t.transposed else 1], weight.dtype, weight.device].append(t)
        found += [together for together in kinds.values() if len(together) > 1]
    return found


def shared_global_scale(together: list[Target], scale_search: str) -> Tensor:
    """The global scale of all weights of ``together`` at once, float32 ``[]``."""
    peaks = []
    for t in together:
        low, high = torch.aminmax(t.module.get_parameter("weight").detach())
        peaks.append(torch.maximum(high, -low))
    return nvfp4.global_scale_of(torch.stack(peaks).amax(), scale_search)


def pack_model(model: nn.Module) -> None:
    """Pack the siblings among the FP4Linear of ``model``; every bit stays, global scales of their own included."""
    paths: dict[int, int] = defaultdict(int)
    for _, module in model.named_modules(remove_duplicate=False):
        paths[id(module)] += 1
    owners: dict[tuple, int] = defaultdict(int)
    plain = {}
    for name, module in model.named_modules():
        if type(module) is FP4Linear and paths[id(module)] == 1 and module._parameters.get("bias") is None:
            plain[name] = module
    for _, b in model.named_buffers(remove_duplicate=False):
        owners[tensor_key(b)] += 1
    alone = [name for name, m in plain.items() if owners[tensor_key(m.qdata)] == 1 and (m.bias is None or owners[tensor_key(m.bias)] == 1)]
    for names in sets_of(alone):
        kinds: dict[tuple, list[FP4Linear]] = defaultdict(list)
        for layer in map(plain.__getitem__, names):
            if layer.qdata.device.type != "meta":
                kinds[layer.in_features, layer.dtype, layer.qdata.device, layer.prefill].append(layer)
        for layers in kinds.values():
            if len(layers) > 1:
                pack_siblings(layers)


def annotated(report: Report, model: nn.Module) -> Report:
    """``report`` with a remark at every packed layer."""
    together: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        if isinstance(module, SiblingLinear):
            together[id(module.packed)].append((module.start, name))
    notes: dict[str, str] = {}
    for rows in together.values():
        names = [name for _, name in sorted(rows)]
        notes |= dict.fromkeys(names, NOTE.format("/".join(name.rpartition(".")[2] for name in names)))
    layers = [replace(i, notes=(*i.notes, notes[i.name])) if i.name in notes else i for i in report.layers]
    return replace(report, layers=layers)
