"""``scale_search="gptq"``: every linear layer and expert rounded by :mod:`..formats.gptq`, on text the model writes and text that is given.

All layers are measured on the dense model and rounded one block after the other; nothing is changed. The rounded layers, a quarter of the
model's size, are put in place afterwards, so that whatever ends this early leaves the model as it was. Until then they wait in the host's
memory, so that a GPU holds the dense model and what one block needs.
Measuring each layer behind the rounded ones before it gained nothing beyond the noise (KL 0.073 / 0.084 against 0.075 / 0.084 in the
experiments that :mod:`..formats.gptq` names).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..config import NVFP4Config, weight_only
from ..errors import CalibrationError
from ..formats import gptq as numbers
from ..modules import FP4Linear
from . import output_moments, self_calibration
from .calibrate import batches_of, statistics
from .chain import Chain, find_chain, recording
from .convert import dense_weight, move
from .finished import FinishedLayers, LayerStore
from .hessian import Moments
from .output_moments import OutputMoments
from .plan import ExpertsTarget, QuantizationPlan, Target
from .probe import Probe
from .prune import ENOUGH, Dense, dense_layer
from .rounding_error import relative_error
from .routed import RoutedInputs
from .sparsify_experts import PrunedExperts, quantize_experts
from .token_weights import TokenWeights, described_weights, fisher
from .walk import Item, targets_of, walk

# More text goes on helping (twice as much: KL 4 % lower in the same experiments), and writing it is a good part of the time.
SEQUENCES, TOKENS = 64, 256
# Of a small model on a GPU, which takes 20 s more for them. SmolLM2-135M on an H200, KL on a novel and a manual: 64 sequences 0.0645 and 0.0536, 256 sequences
# 0.0582 and 0.0542, 512 sequences 0.0594 and 0.0531, 1,024 sequences 0.0582 and 0.0537 in 52 s more: no gain.
SEQUENCES_GPU = 256
# For who has not asked for "gptq", on a CPU, where its time follows the text. SmolLM2-135M, two cores, KL on 2,048 tokens of a novel and a manual: 0.0711 and
# 0.0508 in 117 s, with all of the text 0.0602 and 0.0447 in 336 s. Others: 16 sequences of 256 tokens 0.0717 and 0.0483 in 139 s, for each token of a sequence
# is a pass of the model; rows one by one 0.0763 and 0.0570 in 80 s, no refinement 0.0777 and 0.0522 in 88 s, rows in four groups 0.0717 and 0.0510 in 100 s.
SEQUENCES_SHORT, TOKENS_SHORT = 32, 128
HELD_OUT = 8  # sequences more, half of each kind, which are not calibrated on: the KL divergence is measured on them
_AT_ONCE = 1024  # tokens of own text in one batch


class Form(NamedTuple):
    """How thorough ``"gptq"`` is: ``sequences`` of own text, ``tokens`` of each, and whether the rows of a layer are rounded ``together`` or each by itself."""

    sequences: int
    tokens: int
    together: bool = True


def form_of(model: nn.Module, short_on: torch.device | None = None) -> Form:
    """What ``model`` is rounded with. ``short_on``: the device that does it, for what takes less time there: on a CPU less text, on a GPU, where rounding is
    most of the time, each row by itself."""
    if short_on is not None and short_on.type == "cpu":
        return Form(SEQUENCES_SHORT, TOKENS_SHORT)
    return Form(SEQUENCES_GPU if self_calibration.is_quick(model) else SEQUENCES, TOKENS, together=short_on is None)


@dataclass
class Prepared:
    """What was found; the model is as it was.

    Args:
        batches: all text.
        means: each layer's and module of experts' statistics (:func:`.calibrate.statistics`).
        layers: by the name of a group's first layer: the rounded weight, and its relative error.
        experts: by the name of a module of experts: both of its weights.
        few: names of layers with too few tokens.
        notes: for the report.
        probe: of the dense model, over text of its own that was held out; None: it writes none, or has no logits.
    """

    batches: list[Any]
    means: dict[str, Any]
    layers: dict[str, tuple[FP4Linear, float]] = field(default_factory=dict)
    experts: dict[str, list[PrunedExperts]] = field(default_factory=dict)
    few: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    probe: Probe | None = None


def prepare(
    model: nn.Module,
    plan: QuantizationPlan,
    config: NVFP4Config,
    device: torch.device | None,
    global_scales: dict[str, Tensor],
    *,
    strict: bool,
    progress: bool,
    store: LayerStore | None = None,
    form: Form | None = None,
) -> Prepared:
    """Round every linear layer and expert of ``plan`` that has enough tokens. Changes nothing.

    Args:
        device: where the weights of a model on the CPU are rounded, and the rounded layers are; None: there.
        global_scales: by layer name, of siblings that share one.
        store: where each finished layer is kept, and taken from if an earlier run left it there.
        form: None: all that :func:`form_of` gives the model.

    Raises:
        CheckpointError: ``store`` holds another run's layers, or cannot be written to.
        CalibrationError: no text, text longer than the model's positions, too little of it, or what :func:`.calibrate.statistics` raises.
        NonFiniteError: a layer met NaN or Inf.
    """
    start, waiting = time.monotonic(), _waiting(model, device)
    given, form = given_batches(model, config), form or form_of(model)
    groups = [g for g in plan.groups if not (g[0].head and config.lm_head == "fp8")]
    finished = None if store is None else FinishedLayers(store, model, [*groups, *plan.experts], given, _settings(config, form))
    batches, held_out, described = text(model, given, finished, form)
    targets = [t for g in groups for t in g]
    items: list[Target | ExpertsTarget] = [*targets, *plan.experts]
    chain = find_chain(model, items) if items else Chain([], broken="there are no linear layers and no experts")
    with recording(chain):
        means = statistics(model, plan.targets, batches, strict=strict, progress=progress, experts=plan.experts)
    prepared = Prepared(batches, means)
    most = max((means[t.name].rows for t in items), default=ENOUGH)
    if most < ENOUGH:
        raise CalibrationError(
            'calibration is too short for scale_search="gptq"; nothing was changed',
            value=f"{most} tokens",
            limit=f">= {ENOUGH} tokens (16,384 or more are worth their time)",
            remedy='Give more text, or use scale_search="activation".',
        )
    moments = output_moments_of(model, groups) if form.together else {}
    weights = fisher(model, targets, batches, chain, progress, plan.experts, moments) if items else TokenWeights()
    del moments
    for of_layer in weights.outputs.values():
        of_layer.to_host()
    together = len(weights.outputs)
    enough = [g for g in groups if sum(means[t.name].rows for t in g) >= ENOUGH]
    prepared.few = {g[0].name: sum(means[t.name].rows for t in g) for g in groups if g not in enough}
    reached = [e for e in plan.experts if means[e.name].rows]
    items_left: list[Item] = [*enough, *reached]
    items_left = [item for item in items_left if finished is None or not _take(item, finished, prepared, weights, config, waiting)]
    for _, item, found in walk(model, chain, items_left, batches, sequential=False, progress=progress, desc="quantize", weigh=weights):
        by_norms = [t.name for t in targets_of(item) if t.name in weights.unknown]
        if isinstance(item, ExpertsTarget) and isinstance(found, RoutedInputs):
            how = Dense("gptq", weight_only(config.prefill))
            both = quantize_experts(item, how, set(), device, found, means[item.name].result())
            for p in both:
                move(p.weight, waiting)
            prepared.experts[item.name] = both
            if finished is not None:
                finished.keep_experts(both, by_norms)
        elif isinstance(item, list) and isinstance(found, Moments):
            layer, error = _layer(item, found, config, device, global_scales.get(item[0].name), weights.outputs.pop(item[0].name, None))
            move(layer, waiting)
            prepared.layers[item[0].name] = layer, error
            if finished is not None:
                finished.keep_layer(item, layer, error, by_norms)
    probe = Probe(model, held_out) if held_out else None
    prepared.probe = probe if probe is not None and probe.usable else None
    prepared.notes = _notes(prepared, weights, described, chain, together, time.monotonic() - start) + ([] if finished is None else [finished.note()])
    return prepared


def output_moments_of(model: nn.Module, groups: list[list[Target]]) -> dict[str, OutputMoments]:
    """What gradients are added to, of each layer whose rows are rounded together: no head, and nothing of too many outputs."""
    outputs = {g[0].name: dense_weight(g[0]).shape[0] for g in groups if has_output_moments(g[0])}
    rank, device = output_moments.rank_of(outputs.values(), output_moments.room(model)), next(model.parameters()).device
    omegas = {n: output_moments.omega_of(n, rank, device) for n in sorted(set(outputs.values()))}
    return {name: OutputMoments(n, omegas[n], device) for name, n in outputs.items()}


def has_output_moments(target: Target) -> bool:
    return not target.head and dense_weight(target).shape[0] <= output_moments.MOST


def _waiting(model: nn.Module, device: torch.device | None) -> torch.device:
    """Where rounded layers are until they are put in place: in the host's memory, or at once on ``device`` where the model is in the host's memory."""
    host = torch.device("cpu")
    return device if device is not None and next(model.parameters()).device == host else host


def _settings(config: NVFP4Config, form: Form) -> dict[str, Any]:
    """What the rounded layers depend on besides the model and the text that is given."""
    return {
        "siblings": config.siblings,
        "lm_head": config.lm_head,
        "own_text": f"{form.sequences + HELD_OUT}x{form.tokens}",
        "enough": ENOUGH,
        "row_groups": numbers.ROW_GROUPS if form.together else 0,
    }


def _take(
    item: Item,
    finished: FinishedLayers,
    prepared: Prepared,
    weights: TokenWeights,
    config: NVFP4Config,
    device: torch.device,
) -> bool:
    """Put what an earlier run made of ``item`` into ``prepared``; False if it made nothing of it."""
    if isinstance(item, ExpertsTarget):
        experts = finished.experts(item, device)
        if experts is None:
            return False
        prepared.experts[item.name], by_norms = experts
    else:
        layer = finished.layer(item, config, device)
        if layer is None:
            return False
        prepared.layers[item[0].name], by_norms = layer
    weights.unknown.update(by_norms)
    return True


def given_batches(model: nn.Module, config: NVFP4Config) -> list[Any]:
    """The batches of ``config.calibration``; none if the model is to write its text alone.

    Raises:
        CalibrationError: it is no iterable of batches, holds none, or one that is too long for the model.
    """
    given: list[Any] = [] if config.calibration in (None, "self") else list(batches_of(config.calibration))
    if not given and config.calibration not in (None, "self"):
        raise CalibrationError(
            "calibration holds no batch (an exhausted generator?)", value=0, limit=">= 1 batch", remedy="Pass a list, or None for the model's own text."
        )
    _check_positions(model, given)  # before minutes are spent on writing
    return given


def text(model: nn.Module, given: list[Any], finished: FinishedLayers | None = None, form: Form | None = None) -> tuple[list[Any], list[Any], str]:
    """``(batches, batches to measure on, the first in words)``: what the model writes, half of it from the beginning of a text and half from random
    tokens, and what is given. Of its own text a part is held out. ``finished``: has that text if an earlier run wrote it.

    Raises:
        CalibrationError: nothing is given, and the model cannot write.
    """
    reason = self_calibration.why_not(model) if given else None
    if reason is not None:
        return given, [], f"{len(given)} given batches, without own text because {reason}"
    form = form or form_of(model)
    count, half = form.sequences + HELD_OUT, HELD_OUT // 2
    written = None if finished is None else finished.text()
    if written is None:
        batch = self_calibration.write(model, count, form.tokens, random_first=count // 2, likeliest=self_calibration.ALL)[0]
        written = cast(Tensor, batch["input_ids"])
        if finished is not None:
            finished.keep_text(written)
    everything = written.to(next(model.parameters()).device)
    held, ids = torch.cat((everything[:half], everything[-half:])), everything[half:-half]
    own, held_out = ([{"input_ids": part, "use_cache": False} for part in t.split(max(1, _AT_ONCE // t.shape[1]))] for t in (ids, held))
    return given + own, held_out, f"{ids.numel()} tokens that the model wrote itself" + (f" and {len(given)} given batches" if given else "")


def _check_positions(model: nn.Module, batches: list[Any]) -> None:
    limit = self_calibration.positions(model)
    longest = max((t.shape[-1] for b in batches if (t := _ids(b)) is not None), default=0)
    if limit is not None and longest > limit:
        raise CalibrationError(
            "a calibration batch is longer than the model has positions; nothing was changed",
            value=f"{longest} tokens",
            limit=f"<= {limit}",
            remedy="Cut the text into shorter sequences.",
        )


def _ids(batch: Any) -> Tensor | None:
    found = batch.get("input_ids") if isinstance(batch, Mapping) else batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    return found if isinstance(found, Tensor) and found.dim() and not found.is_floating_point() else None


def _layer(
    group: list[Target], moments: Moments, config: NVFP4Config, device: torch.device | None, global_scale: Tensor | None, outputs: OutputMoments | None
) -> tuple[FP4Linear, float]:
    dense = dense_weight(group[0])
    dense = dense if device is None else dense.to(device)
    how = Dense("gptq", weight_only(config.prefill) if group[0].head else config.prefill)
    layer = dense_layer(dense, how, moments, None, global_scale, None if outputs is None else partial(outputs.matrix, dense.device))
    return layer, relative_error(dense, layer)


def _notes(prepared: Prepared, weights: TokenWeights, described: str, chain: Chain, together: int, seconds: float) -> list[str]:
    rows = f", the rows of {together} layers together" if together else ""
    notes = [f'scale_search="gptq" over {described}, {described_weights(weights)}{rows}; {seconds:.0f} s']
    if prepared.few:
        name, tokens = min(prepared.few.items(), key=lambda item: item[1])
        notes.append(f'{len(prepared.few)} layers met fewer than {ENOUGH} tokens ({name}: {tokens}): "activation" for them')
    if chain.broken and (prepared.layers or prepared.experts):
        notes.append(f"one decoder block at a time was not possible ({chain.broken}): whole-model passes")
    return notes
