"""One step of the loop: from the token before to the next one, all of it on the device, in buffers that never move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..decoding.naming import cache_name
from . import sampling
from .masks import Masks
from .processors import FILTERS, Program, among


class State:
    """The buffers of a loop. A step reads and writes them in place; a call of ``generate()`` only fills them.

    Attributes:
        token: int64 ``[B, 1]``, the input of the next step.
        position: int64 ``[B, 1]``, its position in its row, padding not counted.
        column: int64 ``[]``, tokens in the cache, padding counted.
        padding: bool ``[B, S]``, False where the prompt is padded, True for the rest.
        tokens: int64 ``[most, B]``, what was generated; rows that have ended hold ``pad``.
        count: int64 ``[]``, how many tokens of each row were generated.
        finished: bool ``[B]``, rows that have ended.
        status: int64 ``[5]``: tokens that belong to the result, have all rows ended, the first bad token (from 1; 0: none); and of prompt lookup, else 0,
            steps until the row ended, tokens that were drafted in them.
        seen: bool ``[B, V]``, the tokens of each row, the prompt's included; one column wide until a program needs it.
        eos: bool ``[V]``, tokens that end a row.
        pad, seed: int64 ``[]``.
    """

    def __init__(self, batch: int, vocabulary: int, most: int, columns: int, device: torch.device):
        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def flags(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.bool, device=device)

        self.batch, self.vocabulary, self.most, self.columns, self.device = batch, vocabulary, most, columns, device
        self.token, self.position, self.column = numbers(batch, 1), numbers(batch, 1), numbers()
        self.padding = torch.ones((batch, columns), dtype=torch.bool, device=device)
        self.tokens, self.count, self.finished, self.status = numbers(most, batch), numbers(), flags(batch), numbers(5)
        self.seen, self.eos = flags(batch, 1), flags(vocabulary)
        self.pad, self.seed = numbers(), numbers()

    def begin(self, prompt: Tensor, mask: Tensor | None, column: int, position: Tensor, seed: int) -> None:
        """Fill the buffers for a prompt, whose logits :func:`emit` gets next.

        Args:
            prompt: ``[B, T]``. mask: ``[B, T']`` or None.
            column: tokens in the cache before the prompt's last one.
            position: ``[B, 1]``, of the prompt's last tokens.
        """
        self.position.copy_(position)
        self.column.fill_(column)
        self.padding.fill_(True)
        if mask is not None:
            self.padding[:, : mask.shape[1]].copy_(mask)
        for buffer in (self.count, self.finished, self.status):
            buffer.zero_()
        self.seed.fill_(seed)
        if self.seen.shape[1] > 1:
            self.seen.zero_()
            self.seen.scatter_(1, prompt, True)

    def remember(self) -> None:
        """Make room for the tokens of each row."""
        if self.seen.shape[1] == 1:
            self.seen = torch.zeros((self.batch, self.vocabulary), dtype=torch.bool, device=self.device)

    def stop_at(self, eos: Sequence[int], pad: int) -> None:
        self.eos.copy_(among(eos, self.vocabulary))
        self.pad.fill_(pad)


def forward_of(model: Any, cache: Any, state: State, masks: Masks, padded: bool, extra: dict[str, Any]) -> Callable[[], Tensor]:
    """A function that runs the model on ``state.token``: logits ``[B, V]`` of the next token."""
    given = extra | {cache_name(): cache}

    def forward() -> Tensor:
        mask = masks(state.padding if padded else None, state.column)
        output = model(input_ids=state.token, attention_mask=mask, use_cache=True, return_dict=True, **given)
        return output.logits[:, -1]

    return forward


def choose(logits: Tensor, seen: sampling.Seen, signature: tuple, values: list[list[Tensor]], chance: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token of each row of ``logits`` ``[B, V]``: int64 ``[B]``, and bool ``[B]``: could it be chosen?

    Args:
        signature: of the program, :attr:`fp4_inductor.generation.processors.Program.signature`.
        values: the tensors of its entries.
        chance: float64 ``[B]`` in [0, 1), if it samples.
    """
    scores = logits.float()
    given, token = sampling.largest(scores)
    left = given
    for (name, numbers), tensors in zip(signature[1:], values):
        scores = FILTERS[name](scores, tensors, numbers, seen)
    if len(signature) > 1:
        left, token = sampling.largest(scores)
    if chance is not None:
        token = sampling.draw(scores, chance)
    # The largest is NaN or inf if one score is, and -inf if all are: of none of these a softmax can be taken.
    return token, torch.isfinite(given) & torch.isfinite(left)


def emit(logits: Tensor, state: State, signature: tuple, values: list[list[Tensor]]) -> None:
    """Choose the next token of each row from ``logits`` ``[B, V]``, write it down, and go on to it: the cache holds one token more.

    Args:
        signature, values: as of :func:`choose`.
    """
    chance = sampling.uniform(state.seed, state.count, logits.shape[0]) if signature[0] else None
    token, finite = choose(logits, state, signature, values, chance)
    going = ~state.finished
    any_going = going.any()
    bad = (~finite & going).any()
    token = torch.where(going, token, state.pad)
    state.tokens.index_copy_(0, state.count.view(1), token.view(1, -1))
    state.finished.logical_or_(state.eos[token] & going)
    state.count.add_(1)
    length = state.status[0] + any_going
    first_bad = torch.where((state.status[2] == 0) & bad, state.count, state.status[2])
    state.status[:3].copy_(torch.stack([length, state.finished.all().long(), first_bad]))
    state.token.copy_(token.view(-1, 1))
    if state.seen.shape[1] > 1:
        state.seen.scatter_(1, token.view(-1, 1), True)
    state.position.add_(1)
    state.column.add_(1)


def load_values(stored: list[list[Tensor]] | None, program: Program, state: State) -> list[list[Tensor]]:
    """The tensors of ``program`` on the device, in the buffers of an earlier program with its signature if there was one."""
    fresh = program.tensors(state.vocabulary)
    if stored is None:
        return [[tensor.to(state.device) for tensor in tensors] for tensors in fresh]
    for old, new in zip(stored, fresh):
        for buffer, tensor in zip(old, new):
            buffer.copy_(tensor)
    return stored
