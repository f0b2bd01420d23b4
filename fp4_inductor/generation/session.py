"""The loop over one cache: its buffers, its compiled functions and its captured steps, kept from one ``generate()`` to the next."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._replay import Host, Runner, device_for
from .._torch.compiling import Compiled
from ..decoding import layerwise, regions
from ..decoding.layerwise import Layerwise
from ..decoding.naming import cache_name
from ..errors import FP4Error, NonFiniteError, ShapeError
from . import caches
from .lookup import Text
from .lookup import emit as emit_drafts
from .lookup import forward_of as forward_of_drafts
from .masks import Masks
from .options import Lookup
from .processors import Program, Stops
from .prompts import MOST, ShortPrompts
from .record import GenerationRecord
from .step import State, emit, forward_of, load_values
from .streaming import Look, Mail, Outlet


@dataclass
class Prompt:
    """What ``generate()`` of Transformers has prepared.

    Attributes:
        ids: int64 ``[B, T]``.
        mask: ``[B, T']``, T' = T or the tokens in the cache before and T; None: the model takes none.
        arguments: of the model's forward.
    """

    ids: Tensor
    mask: Tensor | None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """T'."""
        return self.ids.shape[1] if self.mask is None else self.mask.shape[1]


@dataclass
class Plan:
    """How one call runs.

    Attributes:
        new: tokens to generate at most.
        pad: what rows that have ended are filled with.
        returned: does the caller see the cache afterwards? Then over-run tokens are taken back from it.
        lookup: several tokens a step, with drafts from the text.
        pad_prompts: see :class:`fp4_inductor.LoopOptions`.
        again: a prompt that the cache does not serve is run over another: then it is a :class:`NotServedError`, and the streamer goes on.
    """

    program: Program
    stops: Stops
    new: int
    pad: int
    seed: int
    check_every: int
    returned: bool
    lookup: Lookup | None = None
    pad_prompts: bool = True
    again: bool = False


class NotServedError(Exception):
    """The model could not run its prompt over a KVCache that nobody has asked for."""


class Session:
    """Runs prompts over ``cache``. Whoever calls holds :func:`fp4_inductor.generation.caches.claim`."""

    def __init__(self, model: Any, cache: Any, compiled: bool, device: Host | None = None):
        self.model, self.cache, self.compiled = model, cache, compiled
        self.device = device_for(model.device) if device is None else device
        self.accepts = model_accepts(model)
        self.counted = bool(caches.host_counted(cache))
        self.state: State | None = None
        self.mail: Mail | None = None
        self._values: dict[tuple, list[list[Tensor]]] = {}
        self._runners: dict[tuple, Runner] = {}
        self._forwards: dict[tuple, Compiled] = {}
        self._emit = Compiled(emit, compiled, "the sampling")
        self._texts: dict[Lookup, Text] = {}
        self._emits: dict[Lookup, Compiled] = {}

        def prompt_forward(**inputs: Any) -> Tensor:
            return model(**inputs, return_dict=True).logits[:, -1]

        self._prompt = Compiled(prompt_forward, compiled, "the prompt")
        self._short = ShortPrompts(self._forward_prompt, cache, self.device, model, self.accepts)
        self._layers = Layerwise(model, cache) if compiled and not self._short.never and not layerwise.why_not(model, cache) else None

    def run(self, prompt: Prompt, plan: Plan, streamer: Any, record: GenerationRecord) -> Tensor:
        """Generate behind ``prompt``: int64 ``[new, B]`` on the device, new <= plan.new.

        Raises:
            NonFiniteError: logits were NaN or infinite. NotServedError: ``plan.again``. Whatever the model or the streamer raises.
        """
        outlet: Outlet | None = None
        again = False
        try:
            state, mail = self._begin(prompt, plan, record)
            outlet = Outlet(streamer, mail)
            with _decoding(self.model):
                if plan.lookup is None:
                    produced, look = self._loop(plan, state, mail, outlet, record)
                else:
                    look = self._loop_of_drafts(plan, plan.lookup, state, mail, outlet, record)
            record.tokens = look.length
            if plan.lookup is not None:  # a row that has ended puts nothing into the cache
                record.overrun, record.drafted, record.accepted = record.steps - look.steps, look.drafted, look.length - 1 - look.steps
                if plan.returned:
                    caches.wrote_beyond(self.cache, plan.lookup.queries)
            else:
                record.overrun = produced - look.length
                if plan.returned:
                    caches.crop(self.cache, record.overrun)
            return state.tokens[: look.length].clone()
        except BaseException as error:
            self.device.wait()  # the buffers are not freed, nor used again, under work that is queued
            again = plan.again and outlet is None and isinstance(error, FP4Error)
            if again:
                raise NotServedError(str(error)) from error
            raise
        finally:
            layers = self._layers.kinds.values() if self._layers is not None else ()
            functions = (self._prompt, *layers, self._emit, *self._emits.values(), *self._forwards.values())
            record.notes += [f.note for f in functions if f.note and f.note not in record.notes]
            if outlet is not None:
                outlet.end()
            elif streamer is not None and not again:  # the prompt has failed: who reads the streamer in another thread does not wait for ever
                streamer.end()

    def _begin(self, prompt: Prompt, plan: Plan, record: GenerationRecord) -> tuple[State, Mail]:
        """Run the prompt and choose the first token."""
        past = caches.seq_length(self.cache)
        columns = past + prompt.ids.shape[1] if prompt.mask is None else prompt.mask.shape[1]
        padded = prompt.mask is not None and not bool(prompt.mask.all())
        logits = self._run_prompt(prompt, past, padded, plan.pad_prompts, record)
        signature = plan.program.signature
        with caches.allocating():
            state, mail = self._buffers(logits, plan, columns)
            if plan.program.needs_seen:
                state.remember()
            self._values[signature] = load_values(self._values.get(signature), plan.program, state)
        positions = prompt.arguments.get("position_ids")
        last = positions[:, -1:] if positions is not None else torch.full_like(prompt.ids[:, -1:], columns - 1)
        state.begin(prompt.ids, prompt.mask, columns - 1, last, plan.seed)
        state.stop_at(plan.stops.eos, plan.pad)
        self._padded = padded
        mail.restart()
        self._emit(logits, state, signature, self._values[signature])
        if plan.lookup is not None:
            self._texts[plan.lookup].begin(prompt.ids, state, plan.new)
        return state, mail

    def _run_prompt(self, prompt: Prompt, past: int, padded: bool, pad: bool, record: GenerationRecord) -> Tensor:
        fresh = None
        if prompt.mask is not None and prompt.ids.shape[1] == prompt.mask.shape[1]:  # all tokens, those in the cache too
            fresh = prompt.ids.shape[1] - past
            if fresh <= 0:
                raise ShapeError(
                    "the cache holds the whole prompt already",
                    value=f"{prompt.ids.shape[1]} tokens, {past} of them in the cache",
                    limit="at least one token that is not in the cache",
                    remedy="Reset the cache, or pass all tokens of the text so far and new ones.",
                )
        arguments = prompt.arguments | {cache_name(): self.cache, "use_cache": True}
        if padded:  # a mask that hides nothing would still be read, and attention with a mask takes longer
            arguments["attention_mask"] = prompt.mask
        inputs = self.model.prepare_inputs_for_generation(prompt.ids, next_sequence_length=fresh, is_first_iteration=True, **arguments)
        if not padded:  # Transformers 5.21 makes a mask here where it gets none; the model makes the same one, as part of what is compiled and captured
            inputs.pop("attention_mask", None)
        if self.compiled and not getattr(self.cache, "is_initialized", True):
            # Tensors that a compiled function allocates have no address that a later graph may rely on.
            record.notes.append("the prompt is not compiled: the cache was empty of tensors")
            return self._prompt.plain(**inputs)
        with caches.starting(self.cache, past):
            length, why = self._short.length_of(inputs, past) if pad else (0, "pad_prompts=False")
            if length:
                return self._short(inputs, past, length, record)
            record.prompt = f"as it is ({why})"
            # The host takes 20 ms more to call 36 layers one after the other, for which a short prompt would wait, and a long one does not.
            ids = inputs.get("input_ids")
            is_long = pad and ids is not None and ids.numel() > MOST
            inputs = self._short.inputs_of(inputs)
            return self._forward_prompt(inputs) if is_long else self._prompt(**inputs)

    def _forward_prompt(self, inputs: dict[str, Any]) -> Tensor:
        """Logits ``[B, V]`` of its last token, by one layer after the other, which are compiled in less time."""
        if self._layers is None or self._layers.notes or self._short.never:  # a layer that is not compiled by itself may be as part of the whole
            return self._prompt(**inputs)
        return self._layers.run(self._prompt.plain, inputs)

    def _buffers(self, logits: Tensor, plan: Plan, columns: int) -> tuple[State, Mail]:
        batch, vocabulary = logits.shape
        most = caches.holds(self.cache)
        rows = plan.new + (plan.lookup.queries if plan.lookup is not None else 0)  # a step writes behind the last token
        state = self.state
        fits = state is not None and (state.batch, state.vocabulary) == (batch, vocabulary) and rows <= state.most and columns + plan.new <= state.columns + 1
        if state is None or self.mail is None or not fits:
            length = caches.rounded(columns + plan.new, None) if most is None else most
            self.state = state = State(batch, vocabulary, caches.rounded(rows, None), length, logits.device)
            self.mail = Mail(self.device, state.tokens, state.status)
            self._values, self._runners, self._forwards = {}, {}, {}
        if plan.lookup is not None and plan.lookup not in self._texts:
            self._texts[plan.lookup] = Text(plan.lookup, self.cache.max_length, logits.device)
            self._emits[plan.lookup] = Compiled(emit_drafts, self.compiled, "the sampling")
        return state, self.mail

    def _loop(self, plan: Plan, state: State, mail: Mail, outlet: Outlet, record: GenerationRecord) -> tuple[int, Look]:
        """Run steps until all rows have ended and the host has seen it; how many tokens were made, and the last look."""
        every, ahead = plan.check_every, self.device.ahead
        if plan.returned and plan.stops.eos and not caches.can_crop(self.cache, int(state.column) + plan.new, every * (ahead + 1)):
            every, ahead = 1, 0
            record.notes.append("every token is looked at, because no token can be taken back from this cache")
        produced = 1
        mail.post(produced)
        stopped = False
        while True:
            while mail.under_way > (0 if stopped or produced == plan.new else ahead):
                look = mail.take()
                record.looks += 1
                self._check(look, plan)
                outlet.give(look.length)
                stopped = stopped or look.done
            if stopped or produced == plan.new:
                return produced, look
            for _ in range(min(every, plan.new - produced)):
                self._step(plan, state, record)
                produced += 1
            mail.post(produced)

    def _loop_of_drafts(self, plan: Plan, drafting: Lookup, state: State, mail: Mail, outlet: Outlet, record: GenerationRecord) -> Look:
        """The same with prompt lookup, where the host does not know how many tokens a step makes: the last look.

        As many steps are queued as are needed even if all drafts are right, so that ``plan.new`` tokens take no step too many.
        """
        look = Look(end=1, length=1, done=False, bad=0)  # until the first one
        steps = 0
        mail.post(1)
        while True:
            most = min(plan.new, look.length + (steps - look.steps) * drafting.queries)
            if look.done or most == plan.new or mail.under_way > self.device.ahead:
                if not mail.under_way:
                    return look
                look = mail.take()
                record.looks += 1
                self._check(look, plan)
                outlet.give(look.length)
                continue
            for _ in range(min(plan.check_every, -(-(plan.new - most) // drafting.queries))):
                self._step(plan, state, record)
                steps += 1
            mail.post(min(plan.new, look.length + (steps - look.steps) * drafting.queries), begin=look.length)

    def _check(self, look: Look, plan: Plan) -> None:
        if look.bad:
            names = ", ".join(entry.name for entry in plan.program.entries)
            raise NonFiniteError(
                f"the scores of token {look.bad} hold no finite largest one",
                value="NaN or infinite" + (f", after {names}" if names else ""),
                limit="at least one finite score in each row, and none that is NaN or +inf",
                remedy="Look at the weights (fp4_inductor.report(model)) and at the dtype: float16 overflows where bfloat16 does not. Reset the cache.",
            )

    def _step(self, plan: Plan, state: State, record: GenerationRecord) -> None:
        key = (plan.program.signature, self._padded, caches.phase(self.cache) if self.counted else (), plan.lookup)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = self._make_runner(*key, state)
        how = runner()
        record.steps += 1
        record.replays += how != "run"
        record.captures += how == "capture"
        if runner.note and runner.note not in record.notes:
            record.notes.append(runner.note)

    def _make_runner(self, signature: tuple, padded: bool, phase: tuple[bool, ...], drafting: Lookup | None, state: State) -> Runner:
        forward = self._forwards.get((padded, phase, drafting))
        text = None if drafting is None else self._texts[drafting]
        if forward is None:
            extra: dict[str, Any] = {"position_ids": state.position} if "position_ids" in self.accepts else {}
            extra |= {"logits_to_keep": 1 if drafting is None else drafting.queries} if "logits_to_keep" in self.accepts else {}
            arguments = (self.model, self.cache, state, Masks(self.model, self.cache, any(phase)), padded, extra)
            function = forward_of(*arguments) if text is None else forward_of_drafts(*arguments, text)
            whole = self.compiled and drafting is None and regions.pays_undivided(self.model, state.batch)
            within = functools.partial(regions.undivided, self.cache) if whole else nullcontext
            forward = self._forwards[padded, phase, drafting] = Compiled(function, self.compiled, "the step", within)
        values = self._values[signature]

        def step() -> None:
            self._emit(forward(), state, signature, values)

        def step_of_drafts() -> None:
            choose(*forward(), state, text, self.cache.counter.position, signature, values)

        if drafting is not None:
            choose = self._emits[drafting]
        run = step if drafting is None else step_of_drafts
        return Runner(self.device, run, lambda: caches.advance(self.cache) if self.counted else None, lambda: caches.keep_counts(self.cache))


def session_of(model: Any, cache: Any, compiled: bool) -> Session:
    """The session of ``cache``, with the graphs of earlier calls."""
    held = caches.holder_of(cache)
    if held.session is None or held.session.model is not model or held.session.compiled != compiled:
        held.session = Session(model, cache, compiled)
    return held.session


def model_accepts(model: Any) -> set[str]:
    """Names of the arguments of the model's forward."""
    import inspect

    return set(inspect.signature(model.forward).parameters)


def _decoding(model: Any) -> AbstractContextManager:
    """Transformers' own switch to the experts' implementation for decode steps."""
    switch = getattr(model, "_optimize_model_for_decode", None)
    return switch() if callable(switch) else nullcontext()
