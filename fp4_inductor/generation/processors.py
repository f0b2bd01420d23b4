"""Logits processors and stopping criteria of Transformers as what a step does on the device, or the reason why the host has to run them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import sampling
from .sampling import Seen

Filter = Callable[[Tensor, Sequence[Tensor], tuple[int, ...], Seen], Tensor]

# What a step runs, by name. Arguments: scores, tensors of the entry, whole numbers of the entry (part of the graph), the state of the loop.
FILTERS: dict[str, Filter] = {
    "temperature": lambda s, t, n, state: sampling.temperature(s, t[0]),
    "repetition_penalty": lambda s, t, n, state: sampling.repetition_penalty(s, t[0], state.seen),
    "min_new_tokens": lambda s, t, n, state: sampling.suppress(s, t[1], state.count < t[0]),
    "suppress_tokens": lambda s, t, n, state: sampling.suppress(s, t[0]),
    "top_k": lambda s, t, n, state: sampling.top_k(s, n[0]),
    "top_p": lambda s, t, n, state: sampling.top_p(s, t[0], n[0]),
    "min_p": lambda s, t, n, state: sampling.min_p(s, t[0], n[0]),
    "typical_p": lambda s, t, n, state: sampling.typical(s, t[0], n[0]),
}


@dataclass(frozen=True)
class Entry:
    """One processor: its name in ``FILTERS``, the whole numbers that are part of the graph, and its tensors for a vocabulary of a size."""

    name: str
    numbers: tuple[int, ...]
    tensors: Callable[[int], list[Tensor]]


@dataclass(frozen=True)
class Program:
    """What is done to the logits of a step, in order, and how a token is chosen."""

    entries: tuple[Entry, ...]
    sample: bool

    @property
    def signature(self) -> tuple:
        """Programs with one signature are one graph."""
        return (self.sample, *((e.name, e.numbers) for e in self.entries))

    def tensors(self, vocabulary: int) -> list[list[Tensor]]:
        """The tensors of each entry, on the CPU."""
        return [entry.tensors(vocabulary) for entry in self.entries]

    @property
    def needs_seen(self) -> bool:
        return any(entry.name == "repetition_penalty" for entry in self.entries)


@dataclass(frozen=True)
class Stops:
    """When a row ends: at a token of ``eos``, or when it is ``max_length`` tokens long, the prompt included."""

    max_length: int | None
    eos: tuple[int, ...]


def read_processors(processors: Any, prompt: int, sample: bool) -> tuple[Program, list[str]]:
    """The program of a ``LogitsProcessorList``, and a reason for each processor that it cannot hold."""
    entries: list[Entry] = []
    reasons: list[str] = []
    for processor in processors:
        entry = _entry(processor, prompt)
        if isinstance(entry, str):
            reasons.append(entry)
        else:
            entries.append(entry)
    return Program(tuple(entries), sample), reasons


def read_criteria(criteria: Any) -> tuple[Stops, list[str]]:
    """When a ``StoppingCriteriaList`` stops, and a reason for each criterion that only the host can look at."""
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

    lengths: list[int] = []
    eos: list[int] = []
    reasons = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos += [int(token) for token in criterion.eos_token_id.flatten().tolist()]
        else:
            reasons.append(f"the stopping criterion {_name(criterion)} looks at the tokens on the host")
    return Stops(min(lengths, default=None), tuple(dict.fromkeys(eos))), reasons


def _name(thing: Any) -> str:
    return type(thing).__name__ if not hasattr(thing, "__name__") else thing.__name__


def _entry(processor: Any, prompt: int) -> Entry | str:
    from transformers.generation import logits_process as theirs

    kind = type(processor)
    why = f"the logits processor {_name(processor)} is not served on the device"
    if getattr(processor, "filter_value", -math.inf) != -math.inf:
        return f"{why} with filter_value={processor.filter_value}"
    if kind is theirs.TemperatureLogitsWarper:
        return _number("temperature", processor.temperature)
    if kind is theirs.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):  # of each row, its padding: Transformers 5.23
            ignored = ignored.max().item()
        if ignored:
            return f"{why} with prompt_ignore_length={ignored}"
        return _number("repetition_penalty", processor.penalty)
    if kind is theirs.TopKLogitsWarper:
        return Entry("top_k", (processor.top_k,), lambda vocabulary: [])
    if kind is theirs.TopPLogitsWarper:
        return _number("top_p", 1 - processor.top_p, processor.min_tokens_to_keep)
    if kind is theirs.MinPLogitsWarper:
        return _number("min_p", processor.min_p, processor.min_tokens_to_keep)
    if kind is theirs.TypicalLogitsWarper:
        return _number("typical_p", processor.mass, processor.min_tokens_to_keep)
    if kind is theirs.MinLengthLogitsProcessor:
        return _until(processor.min_length - prompt, processor.eos_token_id)
    if kind is theirs.MinNewTokensLengthLogitsProcessor:
        return _until(processor.min_new_tokens + processor.prompt_length_to_skip - prompt, processor.eos_token_id)
    if kind is theirs.SuppressTokensLogitsProcessor:
        return Entry("suppress_tokens", (), lambda vocabulary: [among(processor.suppress_tokens.tolist(), vocabulary)])
    return why


def _number(name: str, value: float, *numbers: int) -> Entry:
    return Entry(name, numbers, lambda vocabulary: [torch.tensor(value, dtype=torch.float32)])


def _until(tokens: int, eos: Tensor) -> Entry:
    """None of ``eos`` among the first ``tokens`` that are generated."""
    return Entry("min_new_tokens", (), lambda vocabulary: [torch.tensor(tokens), among(eos.flatten().tolist(), vocabulary)])


def among(tokens: Sequence[int], vocabulary: int) -> Tensor:
    """bool ``[vocabulary]``: is it one of ``tokens``? Numbers outside of the vocabulary are no token."""
    found = torch.zeros(vocabulary, dtype=torch.bool)
    found[[token for token in tokens if 0 <= token < vocabulary]] = True
    return found
