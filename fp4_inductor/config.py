"""Frozen configuration objects. An unknown field is a TypeError from the dataclass; a bad value is a ConfigError."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from ._renamed import has_old_names
from .errors import ConfigError

ScaleSearch = Literal["auto", "amax", "four_over_six", "mse", "activation", "gptq"]
WeightOnly = Literal["auto", "fp8", "bf16"]
Prefill = Literal["auto", "fp8", "bf16", "nvfp4"]
Siblings = Literal["packed", "shared", "separate"]
Head = Literal["bf16", "nvfp4", "fp8"]
Attention = Literal["auto", "keep"]
Pruning = Literal["existing", "magnitude", "wanda", "sparsegpt", "admm"]
_NEEDS_DATA = ("wanda", "sparsegpt", "admm")
_BITS = (3.5, 4.5)  # a weight in 2:4-sparse and in dense NVFP4


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


@has_old_names
@dataclass(frozen=True)
class NVFP4Config:
    """How :func:`fp4_inductor.quantize_model` turns weights into NVFP4.

    Args:
        scale_search: how the E4M3 scale of each block of 16 weights is chosen.

            * ``"auto"`` (default, needs no data): the best that fits. For a causal language model of transformers ``"gptq"`` over text that
              it writes itself (and over ``calibration``, if it is given), if that takes about 120 seconds at most: some 19 M weights
              for each CPU core, with less text some 54 M; 5.2 G on a GPU (4.5 G of experts), with rows rounded one by one 7.1 G. If that takes
              longer, or fails, or has a higher KL on text that was held out, ``"activation"`` over ``calibration`` or over text the model
              writes. ``"four_over_six"`` for every other model, and where writing fails or would take long (above 2 G parameters on a CPU).
              The report says which, why, and at what KL.
            * ``"amax"``: ``amax / 6``, the plain rule.
            * ``"four_over_six"``: per block the better of ``amax/6`` and ``amax/4`` by squared error
              (Cook et al., "Four Over Six", 2025).
            * ``"mse"``: the best of 15 neighbouring E4M3 codes by squared error.
            * ``"activation"``: the same sweep with each input channel weighted by E[x^2] over ``calibration``.
            * ``"gptq"``: codes and scales together, so that the layer's outputs change least: GPTQ with the scale chosen inside
              the loop, then coordinate descent, each token weighted with its Fisher information (one backward pass). The
              best (SmolLM2-135M: KL 0.047 / 0.056 nats a token on a manual / a novel, by "activation" 0.091 / 0.096) and the
              slowest (there 304 s against 6 s on two CPU cores); the quantized layers of a model on a GPU lie in the host's memory
              meanwhile. On a CPU rows are rounded together, too; one by one, as on a GPU, it is 0.052 / 0.061. Over
              16,384 tokens that the model writes itself (on a GPU, below a billion parameters, 65,536), and over ``calibration`` besides,
              if it is given. Each expert is rounded by the tokens routed to it. Layers and experts that met fewer than 256 tokens get
              ``"activation"``; the report says which.
              Source: Frantar et al., "GPTQ" (2023).
        calibration: for ``"auto"``, ``"activation"`` and ``"gptq"``: an iterable of batches, or ``"self"`` for text the model writes. A batch is a
            tensor (passed as the only positional argument), a tuple (positional arguments) or a mapping (keyword
            arguments) of the model's forward.
        prefill: path for many rows (prefill). ``"fp8"``: dequantise to a transient FP8 weight and use the FP8 tensor
            cores, activations rounded to E4M3 per token. ``"bf16"``: transient weight in the activation's dtype.
            ``"auto"``: FP8 where the GPU has FP8 tensor cores and the activations are bfloat16, else bf16.
            ``"nvfp4"`` (W4A4; never chosen by "auto", for it costs more than the weights do: the report says how much):
            activations rounded to NVFP4 per token, for the FP4 tensor cores of sm_100 and sm_120. Elsewhere the same numbers
            are computed in high precision, slower than any other choice: to judge the quality before such a GPU is there.
            Few rows (decoding; on an H200 up to 128, up to 64 of a layer of 2^25 weights or more), experts and the output head
            keep their activations.
        siblings: layers of one module that usually read one input (q/k/v, gate/up). ``"packed"``: adjacent rows of one
            buffer, so that compiled graphs make one call of them; every bit is as if they were apart. ``"shared"``: one
            global scale besides, which lets every kernel take them in one call; block scales are rounded a little
            differently. ``"separate"``: as any other layer. Checkpoints stay per layer in any case.
        lm_head: the output head. ``"bf16"``: as it is (its error goes straight into the logits). ``"fp8"``: E4M3 with one
            scale per output, half the memory. ``"nvfp4"``: as the other layers, 28%. A head that is tied to the embedding
            gets a weight of its own then, and the embedding stays. The report has its relative error and, where the
            scales are calibrated, the KL divergence that the head alone causes.
        attention: of a Transformers decoder that runs "sdpa". ``"auto"``: on CUDA decode steps, and prompts over a bool mask, run
            ``fp4.decode_attention``, which reads the cache where it lies and no more than the mask leaves in; everything else stays
            "sdpa". ``"keep"``: as it is.
    """

    scale_search: ScaleSearch = "auto"
    calibration: Iterable[Any] | Literal["self"] | None = field(default=None, repr=False, compare=False)
    prefill: Prefill = "auto"
    siblings: Siblings = "packed"
    lm_head: Head = "bf16"
    attention: Attention = "auto"

    def __post_init__(self) -> None:
        _one_of(self, "scale_search", ScaleSearch)
        _one_of(self, "prefill", Prefill)
        _one_of(self, "siblings", Siblings)
        _one_of(self, "lm_head", Head)
        _one_of(self, "attention", Attention)
        if self.scale_search == "activation" and self.calibration is None:
            raise ConfigError(
                'scale_search="activation" needs calibration data',
                value="calibration=None",
                limit='an iterable of batches, or "self"',
                remedy='Pass calibration=[batch, ...] (a few thousand tokens), or calibration="self" for text the model writes.',
            )
        if self.scale_search not in ("auto", "activation", "gptq") and self.calibration is not None:
            raise ConfigError(
                "calibration data would not be used",
                value=f'scale_search="{self.scale_search}"',
                limit='scale_search="activation" or "gptq"',
                remedy="Leave scale_search out, or calibration.",
            )


@has_old_names
@dataclass(frozen=True)
class Sparse24Config:
    """How :func:`fp4_inductor.quantize_model` turns weights into 2:4-sparse NVFP4: 3.5 bits a weight instead of 4.5.

    Args:
        pruning: which two of four consecutive weights are kept.

            * ``"existing"`` (default): those that are not zero. A layer that is not 2:4 already is an error.
            * ``"magnitude"``: the larger ones. Ruins a dense model; refused unless ``accept_loss=True``.
            * ``"wanda"``: the larger ``|w| * sqrt(E[x^2])``.
            * ``"sparsegpt"``: SparseGPT with FP4 rounding inside the loop; the other weights make good what pruning costs.
            * ``"admm"``: the same aim by operator splitting (ALPS): better, and about twice as slow.

            The last three need ``calibration``; the last two prune one decoder block after the other, so that each makes
            good what the ones before it changed. Each expert of an MoE layer is pruned by the tokens routed to it; one that saw
            few borrows from its layer's others, and the report names it.
        scale_search: as in :class:`NVFP4Config`, over the kept weights; None: ``"activation"`` where there is
            ``calibration``, else ``"mse"``. ``"gptq"``: tokens are weighted with their Fisher information, for ``pruning`` too, and the kept
            weights, and the dense layers of a mixture, are rounded as there; over ``calibration`` alone, without text of the model's own.
        calibration: as in :class:`NVFP4Config`; any method takes it. With four batches or more the last eighth is held
            back, and the report says what the new weights cost on it (KL from the dense model, for models with logits).
        layers: names of the layers to be sparse, written as for ``ignore``; the others become dense NVFP4. None: all may be. The
            two weights of a module of experts have names of their own (``"mlp.experts.down_proj"``).
        max_error: a layer becomes sparse if its relative output error (without calibration: weight error) is at most this.
        bits: the layers that cost least become sparse, until the mean is at most this many bits a weight (3.5 to 4.5).
        max_kl: as many layers as possible become sparse, the cheapest first, while KL from the dense model, in nats per
            token on calibration data, stays at most this. At most one of the three; None of them: all layers.
        accept_loss: required by ``pruning="magnitude"``, which nothing keeps from ruining a model.
        prefill: as in :class:`NVFP4Config`, but for "nvfp4".
        attention: as in :class:`NVFP4Config`.
    """

    pruning: Pruning = "existing"
    scale_search: ScaleSearch | None = None
    calibration: Iterable[Any] | None = field(default=None, repr=False, compare=False)
    layers: Iterable[str] | None = None
    max_error: float | None = None
    bits: float | None = None
    max_kl: float | None = None
    accept_loss: bool = False
    prefill: WeightOnly = "auto"
    attention: Attention = "auto"

    def __post_init__(self) -> None:
        _one_of(self, "pruning", Pruning)
        _one_of(self, "prefill", WeightOnly)
        _one_of(self, "attention", Attention)
        if self.scale_search is not None:
            _one_of(self, "scale_search", ScaleSearch)
        data = "Pass calibration=[batch, ...] (a few thousand tokens of text like that the model will see)"
        for name, needs in (
            ("pruning", self.pruning in _NEEDS_DATA),
            ("scale_search", self.scale_search in ("activation", "gptq")),
            ("max_kl", self.max_kl is not None),
        ):
            if needs and self.calibration is None:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} needs calibration data", value="calibration=None", limit="an iterable of batches", remedy=f"{data}."
                )
        budgets = {name: getattr(self, name) for name in ("max_error", "bits", "max_kl") if getattr(self, name) is not None}
        if len(budgets) > 1:
            raise ConfigError("more than one budget", value=budgets, limit="one of max_error, bits, max_kl", remedy="Leave the others out.")
        for name, value in budgets.items():
            low, high = _BITS if name == "bits" else (0.0, float("inf"))
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} is out of range", value=repr(value), limit=f"{low} to {high}", remedy="Sparse24Config describes it.")
        if self.pruning == "magnitude" and not self.accept_loss:
            raise ConfigError(
                'pruning="magnitude" ruins most dense models (SmolLM2-135M: perplexity 15 -> 2,225; fp4_inductor/models/README.md has the table)',
                value="accept_loss=False",
                limit="accept_loss=True",
                remedy=f'Use pruning="sparsegpt", which costs far less: {data[0].lower()}{data[1:]}; or say accept_loss=True.',
            )
        if self.layers is not None and not isinstance(self.layers, str) and isinstance(self.layers, Iterable):
            object.__setattr__(self, "layers", tuple(self.layers))

    @property
    def search(self) -> ScaleSearch:
        """The scale search in force."""
        return self.scale_search or ("mse" if self.calibration is None else "activation")

    @property
    def budget(self) -> str:
        """The name of the budget that is given, or ``""``."""
        return next((name for name in ("max_error", "bits", "max_kl") if getattr(self, name) is not None), "")


def check_attention(attention: str) -> None:
    """Raise for an ``attention`` that :class:`NVFP4Config` would refuse."""
    NVFP4Config(attention=attention)  # type: ignore[arg-type]


def weight_only(prefill: Prefill) -> WeightOnly:
    """``prefill`` for weights whose activations are never rounded to NVFP4: experts, and the output head."""
    return "auto" if prefill == "nvfp4" else prefill


def _is_threshold(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], int) and item[1] >= 0


@dataclass(frozen=True)
class DispatchConfig:
    """Overrides of the choice of kernels (``kernels/choose``).

    Args:
        thresholds: ``{regime: largest M}``, e.g. ``{"gemv": 1, "mid": 512}``; regimes are those of
            :func:`fp4_inductor.kernels.registry.regimes`. A regime not named keeps its bound.
        unproven: what a compiled graph does when M cannot be proven to lie in one regime: ``"guard"`` (one graph per
            regime, full fusion) or ``"runtime"`` (one graph, the op picks the kernel on the host at each call).
            Ahead-of-time compilation and unbacked symbols always use ``"runtime"``.
        candidates: kernels whose rows are off by default, because nobody has timed them on a GPU yet or because they lost where somebody did,
            e.g. ``("cuda_w4a4",)``. One that is named here serves its regime in place of that regime's other rows.
        early: ``"proven"``: in a compiled graph on sm_90, a kernel of ours may begin, and fetch its first weights, while the kernel before it is
            still running, where it is proven that this one does not write them (programmatic dependent launch). ``"never"``: it does not.
    """

    thresholds: tuple[tuple[str, int], ...] = ()
    unproven: Literal["guard", "runtime"] = "guard"
    candidates: tuple[str, ...] = ()
    early: Literal["proven", "never"] = "proven"

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
        _one_of(self, "early", Literal["proven", "never"])
        if isinstance(self.candidates, str) or not all(isinstance(name, str) for name in self.candidates):
            raise ConfigError(
                "candidates are not names of kernels", value=repr(self.candidates), limit="a tuple of strings", remedy='Write candidates=("cuda_w4a4",).'
            )
        object.__setattr__(self, "candidates", tuple(sorted(set(self.candidates))))


class _Blocks(NamedTuple):
    """The :class:`dispatch` blocks around the running code, outermost first, and the config that they make of ``base``."""

    entered: tuple[dispatch, ...]
    base: DispatchConfig
    config: DispatchConfig


_Block = TypeVar("_Block")
_base = DispatchConfig()
_blocks: ContextVar[_Blocks | None] = ContextVar("fp4_inductor_dispatch", default=None)
_setting = threading.Lock()
# Called after the config in force has changed. The passes put it into torch's cache keys from here.
dispatch_observers: list[Callable[[], None]] = []


def dispatch_config() -> DispatchConfig:
    """The :class:`DispatchConfig` in force: that of :func:`set_dispatch`, with what the :class:`dispatch` blocks around the caller replace."""
    blocks = _blocks.get()
    if blocks is None:
        return _base
    return blocks.config if blocks.base is _base else _merged(blocks.entered, _base)


def set_dispatch(config: DispatchConfig | None = None, /, **fields: Any) -> DispatchConfig:
    """Replace fields of :class:`DispatchConfig` for the whole process, in every thread, until the next call.

    Inside a :class:`dispatch` block the fields that the block names keep its values. Calls of operators follow at once. A compiled graph that is
    in memory keeps the config that it was compiled under, as with torch's own configs; ``torch.compiler.reset()`` drops it. Artifacts in torch's
    compile caches are keyed by the config, and so is :func:`fp4_inductor.cache_salt`. Other processes (workers, ranks) have a config of their own.

    Args:
        config: the config whose other fields are taken; None: the one that was set before. ``set_dispatch(DispatchConfig())`` sets the defaults.
        fields: those of :class:`DispatchConfig`.

    Returns:
        The config that was set before, for ``set_dispatch(before)``.

    Raises:
        fp4_inductor.errors.ConfigError: a field has a value that it does not take; nothing is changed.
        TypeError: :class:`DispatchConfig` has no such field; nothing is changed.
    """
    global _base
    if config is not None and not isinstance(config, DispatchConfig):
        raise ConfigError(
            "set_dispatch() got no DispatchConfig",
            value=repr(config),
            limit="a DispatchConfig",
            remedy='Write fields by name: set_dispatch(unproven="runtime").',
        )
    with _setting:
        before = _base
        _base = replace(config or before, **fields)
    _tell()
    return before


class dispatch(ContextDecorator):  # noqa: N801  (a context manager, used like a function)
    """Context manager: run with some fields of :class:`DispatchConfig` replaced, in this thread.

    Blocks nest. Of the blocks that name a field the innermost counts, and each of them before :func:`set_dispatch`. Another thread does not see the
    block, even if it is started inside (the block belongs to the current ``contextvars.Context``, so an asyncio task has its own).

    Artifacts in torch's compile caches are keyed by the config in force. A graph already in memory keeps the config it was compiled under, as
    with torch's own configs; ``torch.compiler.reset()`` drops it.

    Raises:
        fp4_inductor.errors.ConfigError: a field has a value that it does not take.
        TypeError: :class:`DispatchConfig` has no such field.
    """

    def __init__(self, **fields: Any):
        replace(_base, **fields)
        self._fields = fields

    def __enter__(self) -> DispatchConfig:
        return _enter((*_entered(), self))

    def __exit__(self, *error: object) -> None:
        _enter(without(_entered(), self))

    def _recreate_cm(self) -> dispatch:
        return dispatch(**self._fields)


def without(entered: tuple[_Block, ...], block: _Block) -> tuple[_Block, ...]:
    """``entered``, outermost first, without its innermost ``block``: blocks may end in another order than they began."""
    for i in reversed(range(len(entered))):
        if entered[i] is block:
            return entered[:i] + entered[i + 1 :]
    return entered


def _entered() -> tuple[dispatch, ...]:
    blocks = _blocks.get()
    return blocks.entered if blocks else ()


def _enter(entered: tuple[dispatch, ...]) -> DispatchConfig:
    base = _base
    config = _merged(entered, base)
    _blocks.set(_Blocks(entered, base, config) if entered else None)
    _tell()
    return config


def _merged(entered: tuple[dispatch, ...], base: DispatchConfig) -> DispatchConfig:
    fields: dict[str, Any] = {}
    for block in entered:
        fields |= block._fields
    return replace(base, **fields)


def _tell() -> None:
    for changed in dispatch_observers:
        changed()
