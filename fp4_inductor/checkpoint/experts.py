"""Put empty FP4Experts where a checkpoint has packed ones, so that their buffers are matched and read like any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import CheckpointError, bullet_names
from ..models.convert import carry_over, replace_module
from ..models.experts import ExpertsSpec, describe_experts
from ..modules import FP4Experts
from .manifest import ExpertsEntry


@contextmanager
def experts_in_place(model: nn.Module, experts: dict[str, ExpertsEntry]) -> Iterator[nn.Module]:
    """Yield the model with meta FP4Experts installed; an exception inside puts the old modules back.

    Raises:
        CheckpointError: the model has no experts, or others, where the checkpoint has them; the model is unchanged.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    wrong = [f"{name}: {problem}" for name, entry in experts.items() if (problem := _misfit(modules.get(name), entry))]
    if wrong:
        raise CheckpointError(
            f"the checkpoint's experts do not fit the model; nothing was changed:\n{bullet_names(wrong)}\n",
            value=f"{len(wrong)} differences",
            limit="the architecture that was saved",
            remedy="Build the model from the configuration it was saved with.",
        )
    paths: dict[int, list[str]] = {}
    for name in experts:
        paths.setdefault(id(modules[name]), []).append(name)
    old = {names[0]: (tuple(names), modules[names[0]]) for names in paths.values()}
    try:
        for name, (names, module) in old.items():
            new = experts[name].module()
            carry_over(module, new)
            model = replace_module(model, names, new)
        yield model
    except BaseException:
        for names, module in old.values():
            replace_module(model, names, module)
        raise


def _misfit(module: nn.Module | None, entry: ExpertsEntry) -> str | None:
    """Why ``module`` cannot become the saved FP4Experts, or None."""
    if module is None:
        return "the model has no such module"
    if isinstance(module, FP4Experts):
        shapes, spec = (module.first.shape, module.down_proj.shape), (module.first_name, module.first.bias is not None, module.dense, module.identity)
    else:
        found = describe_experts(module)
        if not isinstance(found, ExpertsSpec):
            return f"packed experts in the checkpoint, {found or type(module).__name__} in the model"
        down = module.get_parameter("down_proj")
        dense = (module.get_parameter(found.first)[: len(down)], down)  # nothing is stored for experts that return their input
        shapes = tuple((p.shape[0], p.shape[2], p.shape[1]) if found.transposed else tuple(p.shape) for p in dense)  # type: ignore[assignment]
        spec = (found.first, found.bias, found.dense, found.identity)
    if shapes != (entry.gate_up, entry.down):
        return f"{entry.gate_up}, {entry.down} in the checkpoint, {shapes[0]}, {shapes[1]} in the model"
    if spec != (entry.first, entry.bias, entry.dense, entry.identity):
        return f"{(entry.first, entry.bias, entry.dense, entry.identity)} in the checkpoint, {spec} in the model"
    return None
