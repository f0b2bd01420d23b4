"""The two doors to the loop: :func:`generate`, and :func:`generate_loop` for ``model.generate(custom_generate=...)``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _notice
from ..decoding.naming import cache_name
from ..errors import ConfigError, FP4Error
from . import caches, prepared, reasons
from .masks import why_no_masks
from .options import LoopOptions, check_ids, check_mask, check_ranges, check_rows, check_together, lookup_of
from .processors import read_criteria, read_processors
from .record import GenerationRecord
from .session import NotServedError, Plan, Prompt, session_of


def generate(
    model: Any,
    ids: Tensor,
    *,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    streamer: Any = None,
    loop: LoopOptions | None = None,
    **options: Any,
) -> Any:
    """Generate tokens behind ``ids``; the host only replays one CUDA graph a token and looks now and then whether all rows have ended.

    One step, from the token before to the next one, runs on the device: the model, the logits processors, the choice, the end of rows. On CUDA it is
    compiled and captured in one CUDA graph. Greedy tokens are those of ``model.generate``; sampled ones follow its distribution, and depend on the seed
    alone. What the device cannot do runs Transformers' loop: :func:`fp4_inductor.generation_record` says which ran and why, and a line on stderr does.

    Args:
        model: a causal language model of Transformers, quantized or not.
        ids: int64 ``[B, T]`` on the model's device; shorter rows are padded on the left.
        attention_mask: ``[B, T]``, 0 for padding; None: no padding, or where the model's ``pad_token_id`` is.
        past_key_values: a cache of fixed size, such as ``StaticCache``; for prompt lookup a :class:`fp4_inductor.KVCache`. It is used from where it stands,
            and afterwards holds all tokens but the last. None: one that the next call takes over, with its graph: a KVCache, or where that does not serve the
            model a StaticCache. The record's ``notes`` say if it is one, and why, and if the attention ``"fp4_inductor"`` was selected for a KVCache.
        cache: the name that ``past_key_values`` has from Transformers 5.24 on. Both names are taken under every Transformers.
        streamer: of Transformers. It gets the prompt, then each token ``[B]`` in order, in blocks of ``check_every``, then ``end()``.
        loop: a :class:`fp4_inductor.LoopOptions`; or give its fields themselves: ``seed``, ``check_every``, ``compiled``, ``pad_prompts``.
        options: of ``model.generate``: ``max_new_tokens``, ``min_new_tokens``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``,
            ``typical_p``, ``repetition_penalty``, ``eos_token_id``, ``pad_token_id``, ``prompt_lookup_num_tokens``, ``max_matching_ngram_size``,
            ``generation_config``, ...

    Returns:
        What ``model.generate`` returns: int64 ``[B, T + new]``, or with ``return_dict_in_generate=True`` an output with ``sequences`` and
        the cache, under the name that it has in Transformers.

    Raises:
        ConfigError, DTypeError, ShapeError, DeviceError, CacheInUseError: before anything has run.
        NonFiniteError: logits were NaN or infinite; told at the next look.
    """
    fields = {name: options.pop(name) for name in ("seed", "check_every", "compiled", "pad_prompts") if name in options}
    if loop is not None and fields:
        raise ConfigError("loop and its fields are given", value=sorted(fields), limit="one of the two", remedy="Put all into LoopOptions(...).")
    loop = LoopOptions(**fields) if loop is None else loop
    if past_key_values is not None and cache is not None:
        raise ConfigError("past_key_values and cache are two names of one thing", value="both", limit="one of the two", remedy="Leave one out.")
    cache = past_key_values if cache is None else cache
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not (callable(getattr(model, "can_generate", None)) and model.can_generate()):
        raise ConfigError(
            "the model writes no text",
            value=type(model).__name__,
            limit="a model of Transformers with generate(): a causal language model",
            remedy="Run a model with a language head.",
        )
    check_ids(ids, model)
    given_config = options.get("generation_config")
    given = {**vars(given_config), **options} if given_config is not None else options
    check_ranges(given)
    config = prepared.of(model, given_config, {name: value for name, value in options.items() if name != "generation_config"})
    check_together(given, bool(config.do_sample))
    rows = ids.shape[0] * (config.num_return_sequences or 1)
    why = reasons.of_mode(config, options.get("assistant_model"))
    lookup = None if why else lookup_of(config, options.get("assistant_model"))
    if lookup is not None:
        check_rows(rows)
    if config.stop_strings is not None:
        why.append("stop strings are looked for in text, on the host")
    fixed = cache is not None and not reasons.of_cache(cache)
    before = caches.seq_length(cache) if fixed else 0
    if attention_mask is not None:
        check_mask(attention_mask, ids, before)
        options["attention_mask"] = attention_mask
    if fixed and not why:
        new = max(config.max_new_tokens or ((config.max_length or 0) - ids.shape[1]) or 1, 1)
        columns = attention_mask.shape[1] if attention_mask is not None else ids.shape[1]
        caches.check_cache(cache, model, rows, columns, new)
        caches.claim(cache)  # refused here, before the streamer gets anything; the loop claims it again
        caches.release(cache)
    if cache is not None:
        options[cache_name()] = cache

    def theirs(why: list[str]) -> Any:
        _record(model, GenerationRecord(loop="transformers", reasons=why, seed=loop.seed))
        with _seeded(loop.seed, model.device):
            return model.generate(ids, streamer=streamer, **options)

    if why:
        return theirs(why)

    run = _custom(loop, streamer, held=lookup is not None)
    handed_on = prepared.handed_on(model, config, options)
    if lookup is None:
        return model.generate(ids, streamer=streamer, custom_generate=run, **handed_on)
    try:
        return model.generate(ids, custom_generate=run, **handed_on)
    except TheirsError as found:
        why = found.why
    return theirs(why)


def generate_loop(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    seed: int | None = None,
    check_every: int = 8,
    compiled: bool | None = None,
    pad_prompts: bool = True,
    **model_kwargs: Any,
) -> Any:
    """The loop of :func:`fp4_inductor.generate` for ``model.generate(ids, custom_generate=fp4_inductor.generate_loop, ...)``.

    Transformers prepares everything and calls this function in the place of its own loop; the arguments are those of its convention. ``seed``,
    ``check_every``, ``compiled`` and ``pad_prompts`` are given to ``model.generate``, as in
    ``model.generate(ids, custom_generate=fp4_inductor.generate_loop, seed=1)``.

    Returns, raises: as :func:`fp4_inductor.generate`; what only one of Transformers' other ways to decode can do is a ConfigError if it needs arguments
    that the convention leaves out (an assistant, or prompt lookup with something else that this loop cannot do).
    """
    loop = LoopOptions(check_every=check_every, seed=seed, compiled=compiled, pad_prompts=pad_prompts)
    streamer = _streamer_of_caller(model) if streamer is None else streamer
    return _run(Call(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs), loop)


def generate_here(model: Any, ids: Tensor, loop: LoopOptions, **options: Any) -> Tensor:
    """As :func:`generate`, by this loop or not at all, without its checks.

    Raises:
        TheirsError: Transformers' loop would have to run.
        NonFiniteError: logits were NaN or infinite.
    """
    found: Tensor = model.generate(ids, custom_generate=_custom(loop, None, held=True), **options)
    return found


def _custom(loop: LoopOptions, streamer: Any, held: bool) -> Callable[..., Any]:
    """This loop as a ``custom_generate``."""

    def run(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **model_kwargs: Any) -> Any:
        return _run(Call(model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs, held), loop)

    return run


def generation_record(model: Any) -> GenerationRecord | None:
    """What the last ``generate()`` of ``model`` by this package did, as a :class:`fp4_inductor.GenerationRecord`; None if there was none."""
    held = getattr(getattr(model, "_orig_mod", model), caches.HOLDER, None)
    return None if held is None else held.record


def transformers_version() -> str:
    import transformers

    return transformers.__version__


class TheirsError(Exception):
    """Transformers' loop has to run, and it needs what the convention for a ``custom_generate`` leaves out."""

    def __init__(self, why: list[str]):
        super().__init__("; ".join(why))
        self.why = why


@dataclass
class Call:
    """The arguments of Transformers' convention for a ``custom_generate``.

    Attributes:
        held: is the call :func:`generate`'s, which begins anew if Transformers' loop has to run? Then nobody has given the streamer the prompt.
    """

    model: Any
    ids: Tensor
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    arguments: dict[str, Any]
    held: bool = False


def _run(call: Call, loop: LoopOptions) -> Any:
    model, config, arguments = call.model, call.config, dict(call.arguments)
    given = arguments.pop(cache_name(), None)
    given = given if getattr(given, "_is_user_defined", False) else None
    mask = arguments.pop("attention_mask", None)
    length = getattr(config, "_mask_length", None)
    if mask is None and length:  # from 5.18 on Transformers drops a mask that hides nothing: its length says whether the cache has some of the tokens
        mask = call.ids.new_ones((call.ids.shape[0], length))
    program, why = read_processors(call.processors, call.ids.shape[1], bool(config.do_sample))
    stops, more = read_criteria(call.criteria)
    why = [*reasons.of_version(transformers_version()), *reasons.of_config(config), *reasons.of_model(model, arguments), *why, *more]
    if given is not None:
        why += reasons.of_cache(given)
    else:
        why += reasons.of_architecture(model)
    if stops.max_length is None:
        why.append("the number of tokens has no limit")
    if why or stops.max_length is None:
        return _theirs(call, loop, why)
    new = stops.max_length - call.ids.shape[1]
    check_ids(call.ids, model)
    columns = call.ids.shape[1] if mask is None else mask.shape[1]
    lookup = lookup_of(config)
    if lookup is not None:
        check_rows(call.ids.shape[0])
    pad = config._pad_token_tensor
    plan = Plan(
        program=program,
        stops=stops,
        new=new,
        pad=int(pad) if pad is not None else (stops.eos or (0,))[0],
        seed=_seed(loop.seed) if config.do_sample else 0,
        check_every=loop.check_every,
        pad_prompts=loop.pad_prompts,
        returned=given is not None or bool(config.return_dict_in_generate),
        lookup=lookup,
    )
    prompt = Prompt(call.ids, mask, arguments)
    if given is None:
        with caches.allocating():  # the cache too, whose tensors come with the prompt
            return _run_over_own(call, prompt, plan, loop)
    caches.check_cache(given, model, call.ids.shape[0], columns, new)
    caches.claim(given)
    return _run_over(call, prompt, plan, loop, given)


def _run_over_own(call: Call, prompt: Prompt, plan: Plan, loop: LoopOptions) -> Any:
    """Run ``plan`` over a cache that is made here, or was by the call before."""
    length = prompt.columns + plan.new + (plan.lookup.queries if plan.lookup else 0)
    try:
        cache = caches.claim_own_cache(call.model, length, call.ids.shape[0], plan.lookup)
    except FP4Error as error:
        if plan.lookup is None:
            raise
        return _theirs(call, loop, [f"prompt lookup needs a KVCache: {error}"])
    plan.again = plan.lookup is None and caches.is_ours(cache)
    try:
        return _run_over(call, prompt, plan, loop, cache)
    except NotServedError as error:  # a model that computes with keys and values itself
        caches.give_up(call.model, cache, "; ".join([str(error), *cache.notes]))  # the model has the attention that was selected for it
    return _run_over_own(call, prompt, plan, loop)


def _run_over(call: Call, prompt: Prompt, plan: Plan, loop: LoopOptions, cache: Any) -> Any:
    """Run ``plan`` over a cache that is claimed, and release it."""
    model, config = call.model, call.config
    try:
        no_masks = why_no_masks(model, cache)
        why = [no_masks] if no_masks is not None else reasons.of_lookup(cache, plan.lookup, prompt.columns, plan.new)
        if why:
            return _theirs(call, loop, why)
        if call.held and call.streamer is not None:
            call.streamer.put(call.ids.cpu())
        record = GenerationRecord(seed=plan.seed if config.do_sample else None)
        held = caches.holder_of(model)
        if held.cache is cache and caches.is_ours(cache):
            record.notes += cache.notes  # what was changed in the model
        elif held.cache is cache:
            record.notes.append(f"over a StaticCache: {held.why_static}")
        _record(model, record)
        compiled = model.device.type == "cuda" if loop.compiled is None else loop.compiled
        tokens = session_of(model, cache, compiled).run(prompt, plan, call.streamer, record)
    finally:
        caches.release(cache)
    sequences = torch.cat([call.ids, tokens.T], dim=-1)
    if not config.return_dict_in_generate:
        return sequences
    if caches.holder_of(model).cache is cache:
        caches.holder_of(model).cache = None  # it is the caller's now
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(sequences=sequences, **{cache_name(): cache})  # type: ignore[arg-type]


def _theirs(call: Call, loop: LoopOptions, why: list[str]) -> Any:
    """Transformers' loop, with what it has prepared."""
    if call.held:
        raise TheirsError(why)
    from transformers.generation.utils import GENERATION_MODES_MAPPING

    mode = call.config.get_generation_mode(None)
    name = GENERATION_MODES_MAPPING[mode]
    streams = {} if call.streamer is None else {"streamer": call.streamer}
    if name not in ("_sample", "_beam_search") or (streams and name != "_sample"):
        raise ConfigError(
            f"{str(mode.value).replace('_', ' ')} cannot run behind custom_generate" + (" with a streamer" if streams else ""),
            value=why[0],
            limit="sampling, greedy tokens and beam search; a streamer without beams",
            remedy="Leave custom_generate out, or call fp4_inductor.generate.",
        )
    _record(call.model, GenerationRecord(loop="transformers", reasons=why, seed=loop.seed))
    with _seeded(loop.seed, call.model.device):
        return getattr(type(call.model), name)(
            call.model,
            call.ids,
            logits_processor=call.processors,
            stopping_criteria=call.criteria,
            generation_config=call.config,
            **streams,
            **call.arguments,
        )


def _record(model: Any, record: GenerationRecord) -> None:
    held = caches.holder_of(model)
    held.record = record
    if record.reasons and str(record) not in held.said:  # one line for each reason, not for each call
        held.said.add(str(record))
        _notice.say(str(record))


def _seed(seed: int | None) -> int:
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64)) if seed is None else seed


def _seeded(seed: int | None, device: torch.device) -> AbstractContextManager:
    """Inside, torch's own generators begin with ``seed``; afterwards they are what they were."""
    return nullcontext() if seed is None else _forked(seed, device)


@contextmanager
def _forked(seed: int, device: torch.device) -> Any:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _streamer_of_caller(model: Any) -> Any:
    """The ``streamer=`` of the ``model.generate`` that calls. It gives its streamer the prompt, but hands it to no callable."""
    from transformers.generation.utils import GenerationMixin

    generate: Any = inspect.unwrap(GenerationMixin.generate)
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is generate.__code__ and frame.f_locals.get("self") is model:
            return frame.f_locals.get("streamer")
        frame = frame.f_back  # type: ignore[assignment]
    return None
