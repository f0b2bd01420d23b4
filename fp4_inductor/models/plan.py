"""What to do with every parameter of a model, decided before anything is changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..errors import ConfigError
from ..modules import FP4ExpertWeight, FP4Linear
from ..tensors.base import FP4Tensor
from . import families
from .coverage import LayerReport, Report, Skipped
from .experts import ExpertsSpec, describe_experts, interface_weights
from .kinds import expert_family, kept_stack, linear_kind, opaque_reason, stack_owner
from .stacks import StackTarget, experts_stack_of, stack_of
from .training import Training, plain_name, unwrapped

FilterFn = Callable[[nn.Module, str], bool]
_HEADS = {"lm_head", "embed_out", "output_projection"}  # output heads by name, where the model does not say which it is


@dataclass
class Target:
    """One linear layer to be quantized.

    Args:
        names: every path it has in the model.
        transposed: weight is ``[K, N]``.
        head: it is the output head.
        tied: the first other owner of its weight, which keeps it; only a head has one.
    """

    names: tuple[str, ...]
    module: nn.Module
    transposed: bool = False
    head: bool = False
    tied: str = ""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass
class ExpertsTarget:
    """One module of expert weights to be quantized. ``names``: every path it has in the model."""

    names: tuple[str, ...]
    module: nn.Module
    spec: ExpertsSpec

    @property
    def name(self) -> str:
        return self.names[0]

    def stack(self, parameter: str) -> Tensor:
        """One of the module's Parameters: a matrix or a bias for each expert, without what is stored for identity experts and never used."""
        p = self.module.get_parameter(parameter)
        return p[: self.module.get_parameter("down_proj").shape[0]] if self.spec.identity else p


@dataclass
class QuantizationPlan:
    """The decision for one model.

    ``groups``: targets that share one weight tensor are one group. ``gating``: those of ``uncovered`` whose computation is unknown.
    """

    groups: list[list[Target]] = field(default_factory=list)
    experts: list[ExpertsTarget] = field(default_factory=list)
    existing: list[LayerReport] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    uncovered: list[Skipped] = field(default_factory=list)
    gating: list[Skipped] = field(default_factory=list)
    stacks: list[StackTarget] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def targets(self) -> list[Target]:
        return [t for group in self.groups for t in group]


def make_plan(
    model: nn.Module, ignore: Iterable[str] | None = None, filter_fn: FilterFn | None = None, with_head: bool = False, with_stacks: bool = False
) -> QuantizationPlan:
    """Walk ``model`` once and decide. Changes nothing and reads no weight values.

    Args:
        with_head: the output head too.
        with_stacks: the caller converts ``plan.stacks``; otherwise those weights are not covered.
    """
    plan = _walked(model, ignore, filter_fn, with_head, with_stacks, towers=False)
    if plan.groups or plan.experts or plan.stacks or plan.existing or plan.uncovered:
        return plan
    # A vision tower by itself names its layers as it does inside a larger model, and there is nothing but the tower to quantize.
    return _walked(model, ignore, filter_fn, with_head, with_stacks, towers=True)


def _walked(model: nn.Module, ignore: Iterable[str] | None, filter_fn: FilterFn | None, with_head: bool, with_stacks: bool, towers: bool) -> QuantizationPlan:
    paths: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        paths[id(module)].append(name)
    ignored = Names(ignore)
    heads = _output_heads(model)
    owners = _owners(model)
    training = Training.of(model)
    plan = QuantizationPlan()
    wanted: dict[tuple, list[Target]] = defaultdict(list)
    covered_keys: set[tuple] = set()

    for _, module in model.named_modules():
        names = tuple(paths[id(module)])
        user = ignored.reason(names, module, filter_fn) or training.reason(module)
        if isinstance(module, (FP4Linear, FP4ExpertWeight)):
            plan.existing.append(existing_layer(names, module) if isinstance(module, FP4Linear) else existing_experts(names, module))
            continue
        kind = linear_kind(module)
        head = with_head and (id(module) in heads or plain_name(names[0]).rpartition(".")[2] in _HEADS)
        default = None if head else _default_skip(plain_name(names[0]), module, heads, towers)
        experts, unknown, tied = (None, None, None) if user or default else _experts(names, module, owners)
        if experts is not None:
            plan.experts.append(experts)
        if kind in ("linear", "transposed") and module._parameters.get("weight") is None and not (user or default):
            # Its weight is computed (parametrized, pruned): still a linear layer, for the preflight to refuse.
            wanted[(id(module),)].append(Target(names, module, kind == "transposed"))
            continue
        for pname, p in module.named_parameters(recurse=False):
            full = f"{names[0]}.{pname}" if names[0] else pname
            if experts is not None and pname in experts.spec.parameters:
                continue
            if isinstance(p, FP4Tensor):
                plan.existing.append(_existing_tensor(full, p))
                continue
            if kind in ("linear", "transposed") and pname == "weight":
                reason = user or default or (None if is_lazy(p) or p.numel() else "empty")
                if reason is None:
                    # A head is quantized by itself, whoever shares its weight.
                    wanted[("head", tensor_key(p)) if head else tensor_key(p)].append(Target(names, module, kind == "transposed", head))
                    continue
            elif is_lazy(p) or p.numel() == 0:
                continue
            elif p.dim() < 2:
                reason = "vectors (norms, biases): no matrix product"
            elif kind is not None and p.dim() == 2:
                reason = user or default
                if reason is None:
                    plan.uncovered.append(Skipped(full, _once(p, covered_keys), opaque_reason(kind, module)))
                    continue
            else:
                owner = stack_owner(model, names[0], module)
                family = expert_family(owner, pname, p)
                if family is not None and user is None and default is None:
                    stack = _stack(names, module, owner, pname, unknown is not None, owners) if with_stacks else None
                    if stack is not None:
                        plan.stacks.append(stack)
                        continue
                    missed = Skipped(full, _once(p, covered_keys), unknown or tied or family)
                    plan.uncovered.append(missed)
                    if unknown:
                        plan.gating.append(missed)
                    continue
                reason = user or default or kept_stack(owner, pname) or _other_reason(owner)
            plan.skipped.append(Skipped(full, _once(p, covered_keys), reason))

    # A linear layer whose bias is a plain vector is quantized with it: the bias is not a skipped parameter of its own.
    quantized = {f"{t.name}.bias" if t.name else "bias" for group in wanted.values() for t in group}
    for key, group in wanted.items():
        own = {f"{n}.weight" if n else "weight" for t in group for n in t.names}
        head = group[0].head
        foreign = [n for n in owners.get(key[1] if head else key, ()) if n not in own]
        if head:
            group[0].tied = foreign[0] if foreign else ""
        if foreign and not head:
            quantized -= {f"{t.name}.bias" if t.name else "bias" for t in group}
            plan.skipped += [Skipped(f"{t.name}.weight", 0, f"tied to {foreign[0]}") for t in group]
        else:
            plan.groups.append(group)
    plan.skipped = [_tied_reason(s, owners, model) for s in plan.skipped if s.name not in quantized]
    plan.notes += ignored.unused()
    if with_head and not any(t.head for t in plan.targets):
        plan.notes.append("lm_head: there is no output head to quantize, or it is ignored or quantized already")
    return plan


def _experts(names: tuple[str, ...], module: nn.Module, owners: dict[tuple, list[str]]) -> tuple[ExpertsTarget | None, str | None, str | None]:
    """``(the module's experts as a target, why what they compute is unknown, what they are tied to)``, at most one of them."""
    spec = describe_experts(module)
    if not isinstance(spec, ExpertsSpec):
        return None, spec, None
    own = {f"{n}.{p}" if n else p for n in names for p in spec.parameters}
    for p in spec.parameters:
        foreign = [n for n in owners.get(tensor_key(module.get_parameter(p)), ()) if n not in own]
        if foreign:
            return None, None, f"expert weights tied to {foreign[0]}"
    return ExpertsTarget(names, module, spec), None, None


def _stack(names: tuple[str, ...], module: nn.Module, owner: nn.Module, name: str, unknown: bool, owners: dict[tuple, list[str]]) -> StackTarget | None:
    """``module.name`` as a stack to be quantized, or None. ``unknown``: these are experts, and ``fp4.moe`` does not compute what they do."""
    weights = interface_weights(module) or () if unknown else (name,)
    if any(len(owners.get(tensor_key(module.get_parameter(w)), ())) != len(names) for w in weights):
        return None
    return experts_stack_of(names, module, name) if unknown else stack_of(names, owner, name, module.get_parameter(name))


def inspect(model: nn.Module, errors: dict[str, float] | None = None, kept: dict[str, str] | None = None) -> Report:
    """The report of a model as it stands: what is FP4 already, what is skipped by default, what is not covered.

    Args:
        errors: relative errors on record, by layer name.
        kept: reasons on record for layers left out on purpose, by parameter name.
    """
    errors, kept = errors or {}, kept or {}
    plan = make_plan(model)
    layers = [LayerReport(**{**vars(layer), "relative_error": errors.get(layer.name)}) for layer in plan.existing]
    left = [Skipped(f"{t.name}.weight", weight_count(t), "linear layer in high precision") for t in plan.targets]
    left += [Skipped(f"{t.name}.{p}".lstrip("."), t.stack(p).numel(), "expert weights in high precision") for t in plan.experts for p in t.spec.parameters[:2]]
    missed = left + plan.uncovered
    after = model_bytes(model)
    return Report(
        layers=layers,
        skipped=plan.skipped + [Skipped(s.name, s.params, kept[s.name]) for s in missed if s.name in kept],
        uncovered=[s for s in missed if s.name not in kept],
        bytes_before=after + sum(layer.bytes_before - layer.bytes_after for layer in layers),
        bytes_after=after,
    )


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; a tensor that several modules share counts once."""
    seen: dict[tuple, int] = {}
    for tensors in (model.named_parameters(), model.named_buffers()):
        for _, t in tensors:
            for part in t.parts() if isinstance(t, FP4Tensor) else () if is_lazy(t) else (t,):
                seen[tensor_key(part)] = part.numel() * part.element_size()
    return sum(seen.values())


def tensor_key(t: Tensor) -> tuple:
    """Equal for tensors that are the same memory in the same shape (the same Parameter, or an exact alias of it)."""
    if isinstance(t, FP4Tensor):
        return ("parts", *(tensor_key(p) for p in t.parts()))
    if hasattr(t, "to_local"):  # a DTensor: this rank's part
        t = t.to_local()
    # A lazy parameter has no shape, a meta or empty tensor no address: only identity tells those apart.
    if is_lazy(t) or t.device.type == "meta" or t.numel() == 0 or not t.untyped_storage().data_ptr():
        return (id(t),)
    return (t.device, t.untyped_storage().data_ptr(), t.storage_offset(), t.dtype, tuple(t.shape), t.stride())


def existing_layer(names: tuple[str, ...], layer: FP4Linear) -> LayerReport:
    """The report row of an installed FP4Linear."""
    bias = 0 if layer.bias is None else layer.bias.numel() * layer.bias.element_size()
    weights = layer.out_features * layer.in_features
    notes = [f"K padded to a multiple of {layer.storage().k_multiple} ({layer.in_features} -> {layer.in_features + layer.padding})"] if layer.padding else []
    notes += ["one module under several names"] if len(names) > 1 else []
    notes += ['prefill="nvfp4": activations of many rows are rounded to NVFP4'] if layer.prefill == "nvfp4" else []
    return LayerReport(
        names[0],
        (layer.out_features, layer.in_features),
        weights,
        weights * layer.dtype.itemsize + bias,
        sum(t.numel() * t.element_size() for t in layer.parts()) + bias,
        None,
        tuple(notes),
        format=layer.storage().name,
        bits_per_weight=layer.storage().bits_per_weight,
    )


def existing_experts(names: tuple[str, ...], w: FP4ExpertWeight) -> LayerReport:
    """The report row of one weight of installed FP4Experts."""
    bias = 0 if w.bias is None else w.bias.numel() * w.bias.element_size()
    experts, rows, columns = w.shape
    weights = experts * rows * columns
    _, n, k = w.stored
    notes = [f"padded to whole blocks ({[rows, columns]} -> {[n, k]})"] if (n, k) != (rows, columns) else []
    packed = sum(t.numel() * t.element_size() for t in w.parts())
    return LayerReport(
        names[0],
        w.shape,
        weights,
        weights * w.dtype.itemsize + bias,
        packed + bias,
        None,
        tuple(notes),
        format=w.storage().name,
        bits_per_weight=w.storage().bits_per_weight,
    )


def is_lazy(t: Tensor) -> bool:
    """A parameter of a lazy module that has not run yet."""
    return isinstance(t, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


# --- classification ----------------------------------------------------------------------------------------------


def _default_skip(name: str, module: nn.Module, heads: set[int], towers: bool) -> str | None:
    if id(module) in heads:
        return "output head: its error goes straight into the logits"
    for family in families():
        for skip in family.skips:
            if not (towers and skip.part) and skip.matches(name, module):
                return skip.reason
    return None


def _other_reason(module: nn.Module) -> str:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding: a lookup, no matrix product"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    return f"Parameter of {type(module).__name__}, which is not a linear layer"


def _output_heads(model: nn.Module) -> set[int]:
    getter = getattr(model, "get_output_embeddings", None)
    if not callable(getter):
        return set()
    try:
        head = getter()
    except (NotImplementedError, AttributeError):  # transformers: models without a head raise either
        return set()
    return set() if head is None else {id(m) for m in unwrapped(head)}


def _owners(model: nn.Module) -> dict[tuple, list[str]]:
    owners: dict[tuple, list[str]] = defaultdict(list)
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, t in named:
            owners[tensor_key(t)].append(name)
    return owners


def _tied_reason(item: Skipped, owners: dict[tuple, list[str]], model: nn.Module) -> Skipped:
    """Say so if a skipped linear weight is another module's parameter: that is the stronger reason."""
    if item.reason.startswith(("tied", "vectors", "embedding")):
        return item
    prefix, _, pname = item.name.rpartition(".")
    key = tensor_key(getattr(model.get_submodule(prefix), pname))
    others = [n for n in owners[key] if n != item.name]
    return Skipped(item.name, item.params, f"tied to {others[0]}") if others else item


def _once(p: Tensor, seen: set[tuple]) -> int:
    key = tensor_key(p)
    if key in seen or is_lazy(p):
        return 0
    seen.add(key)
    return p.numel()


def weight_count(t: Target | ExpertsTarget | StackTarget) -> int:
    """Weights of a target; 0 where they are computed or not there yet."""
    if isinstance(t, StackTarget):
        return t.weight.numel()
    if isinstance(t, ExpertsTarget):
        return sum(t.stack(p).numel() for p in t.spec.parameters[:2])
    weight = t.module._parameters.get("weight")
    return 0 if weight is None or is_lazy(weight) else weight.numel()


def _existing_tensor(name: str, p: FP4Tensor) -> LayerReport:
    after = sum(t.numel() * t.element_size() for t in p.parts())
    return LayerReport(
        name,
        (int(p.shape[-2]), int(p.shape[-1])),
        p.numel(),
        p.numel() * p.logical_dtype.itemsize,
        after,
        format=p.STORAGE.name,
        bits_per_weight=p.STORAGE.bits_per_weight,
    )


class Names:
    """The user's choice: names, trailing parts of names, ``re:`` patterns, and a filter function. ``option``: where it was written."""

    def __init__(self, entries: Iterable[str] | None, option: str = "ignore"):
        entries = () if entries is None else entries
        listed = list(entries) if isinstance(entries, Iterable) else []
        if not isinstance(entries, Iterable) or isinstance(entries, str) or not all(isinstance(e, str) for e in listed):
            raise ConfigError(
                f"{option} is a list of names",
                value=repr(entries),
                limit='["lm_head", "model.layers.0", "re:.*mlp.*"]',
                remedy="Wrap a single name in a list.",
            )
        self.entries, self.option = listed, option
        self.used: set[str] = set()
        self.patterns = {}
        for e in self.entries:
            if e.startswith("re:"):
                try:
                    self.patterns[e] = re.compile(e[3:])
                except re.error as error:
                    raise ConfigError(
                        f"{option} holds an invalid regular expression",
                        value=f"{e!r} ({error})",
                        limit='"re:" and what re.match takes',
                        remedy='Escape special characters with a backslash, or leave out "re:" to name a layer.',
                    ) from error

    def reason(self, names: tuple[str, ...], module: nn.Module, filter_fn: FilterFn | None) -> str | None:
        for entry in self.entries:
            if any(self._matches(entry, n) for name in names for n in {name, plain_name(name)}):
                self.used.add(entry)
                return f"{self.option}={entry!r}"
        if filter_fn is not None and next(module.parameters(recurse=False), None) is not None and not filter_fn(module, names[0]):
            return "filter_fn"
        return None

    def _matches(self, entry: str, name: str) -> bool:
        if entry in self.patterns:
            return self.patterns[entry].match(name) is not None
        # An entry names a module or a parent of it, by its full name or by its last components.
        parts = name.split(".")
        prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
        return any(p == entry or p.endswith("." + entry) for p in prefixes)

    def unused(self) -> list[str]:
        return [f"{self.option}={e!r} matched nothing" for e in self.entries if e not in self.used]
