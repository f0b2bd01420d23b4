"""Prompt lookup: several tokens a step without a second model, on the device.

Where the last tokens of a text stood earlier in it, the tokens behind that place are *drafts* of what comes next. One step runs the model on the last
token and k drafts, chooses a token at each of these k + 1 positions as a step without drafts would, and keeps the choices up to and with the first that
is not the draft behind it: 1 to k + 1 tokens. So the tokens do not depend on drafts at all; greedy ones are those of a plain loop, and a sampled one is
drawn with the random number of its own place. What the cache holds of drafts that were wrong lies behind its counter, where the next step overwrites it.

All shapes are fixed, and nothing is read on the host: k drafts are made where none are found, too (they repeat the last token).

Source: Saxena, "Prompt lookup decoding" (2023); transformers.generation.candidate_generator (5.17 to 5.24), which takes the first such place, not the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..decoding.naming import cache_name
from . import sampling
from .masks import Masks
from .options import Lookup
from .step import State, choose

_WIDTH = 512  # places in a block of the search: Inductor gives the maximum of one long row to one program
_NOWHERE = -1  # no token


class Text:
    """The tokens of a row, its prompt's included, where drafts are looked for, in buffers that never move.

    Args:
        length: the most tokens.

    Attributes:
        tokens: int64 ``[ngram + places]``; the text begins at ``ngram``, and before it is no token.
        held: int64 ``[]``, how many there are.
        limit: int64 ``[]``, how many tokens are generated at most.
        last: int64 ``[]``, the largest position of a token that the model has to be run on.
    """

    def __init__(self, lookup: Lookup, length: int, device: torch.device):
        self.lookup, self.most = lookup, length
        self.places = -(-(length + lookup.queries) // _WIDTH) * _WIDTH
        self.tokens = torch.full((lookup.ngram + self.places,), _NOWHERE, dtype=torch.int64, device=device)
        self.held, self.limit, self.last = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))

    def begin(self, prompt: Tensor, state: State, new: int) -> None:
        """The prompt ``[1, T]`` and the token behind it, which ``state`` holds; ``new`` tokens are generated at most, this one included."""
        self.limit.fill_(new)
        self.last.copy_(state.position.view(()) + (new - 2))
        first, length = self.lookup.ngram, prompt.shape[1]
        self.tokens[first : first + length].copy_(prompt[0])
        self.tokens[first + length].copy_(state.token.view(()))
        self.held.fill_(length + 1)
        state.finished.logical_or_(state.count >= self.limit)
        state.status[1].copy_(state.finished.all())


def drafts(text: Text) -> tuple[Tensor, Tensor]:
    """What stood behind the last place where the last tokens stood before: int64 ``[k]``, and bool ``[]``: is there one?

    The longest match counts, of these the last. Behind the end of the text it goes on with itself, in the period between the two places.
    """
    ngram, places = text.lookup.ngram, text.places
    place = torch.arange(places, device=text.tokens.device)
    length = torch.zeros_like(place)
    same = None
    for back in range(ngram):  # tokens before the text are none, so that no match reaches beyond its begin: the text's end is behind the place
        equal = text.tokens[ngram - back : ngram - back + places] == text.tokens.index_select(0, (text.held - 1 - back + ngram).view(1))
        same = equal if same is None else same & equal
        length = length + same
    length = torch.where(place < text.held - 1, length, 0)
    best = (length * places + place).view(-1, _WIDTH).amax(1).amax()
    found = best >= places
    begin = torch.where(found, best % places, text.held - 2) + 1
    ahead = torch.arange(text.lookup.tokens, device=text.tokens.device) % (text.held - begin)
    return text.tokens.index_select(0, begin + ahead + ngram), found


def forward_of(
    model: Any, cache: Any, state: State, masks: Masks, padded: bool, extra: dict[str, Any], text: Text
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """A function that runs the model on ``state.token`` and its drafts: logits ``[k + 1, V]``, these tokens ``[k + 1]``, were drafts found ``[]``."""
    queries = text.lookup.queries
    positioned = "position_ids" in extra
    held = {cache_name(): cache}

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        draft, found = drafts(text)
        ids = torch.cat([state.token.view(1), draft])
        mask = masks(state.padding if padded else None, state.column)
        given = extra | held
        if positioned:
            # Drafts beyond the last token have no position of their own, which a model with a table of positions may not have; nobody attends to them.
            given["position_ids"] = torch.minimum(state.position + torch.arange(queries, device=ids.device), text.last)
        output = model(input_ids=ids[None], attention_mask=mask, use_cache=True, return_dict=True, **given)
        return output.logits[0], ids, found

    return forward


@dataclass(frozen=True)
class Place:
    """What processors know of each of the k + 1 positions of a step: :class:`fp4_inductor.generation.sampling.Seen`, a row for each."""

    seen: Tensor
    count: Tensor


def _places(state: State, ids: Tensor, count: Tensor) -> Place:
    """The drafts before a position are taken to be right: if one is not, the position is not used."""
    seen = state.seen
    if seen.shape[1] > 1:
        upto = torch.ones((ids.shape[0], ids.shape[0]), dtype=torch.bool, device=ids.device).tril()
        seen = seen.expand(ids.shape[0], -1).scatter(1, torch.where(upto, ids[None], ids[0]), True)
    return Place(seen, count[:, None])


def emit(logits: Tensor, ids: Tensor, found: Tensor, state: State, text: Text, counter: Tensor, signature: tuple, values: list[list[Tensor]]) -> None:
    """Choose a token at each position, keep those that are right, and write them down.

    Args:
        logits: ``[k + 1, V]``, behind the tokens ``ids`` ``[k + 1]``.
        counter: int64 ``[]``, of the cache, which has counted all k + 1.
        signature, values: as of :func:`fp4_inductor.generation.step.emit`.
    """
    queries = ids.shape[0]
    place = torch.arange(queries, device=ids.device)
    count = state.count + place
    chance = sampling.uniform_at(state.seed, count, torch.zeros_like(place)) if signature[0] else None
    token, finite = choose(logits, _places(state, ids, count), signature, values, chance)

    right = torch.where(token[:-1] == ids[1:], queries - 1, place[:-1]).amin()  # drafts before the first wrong one
    ends = state.eos[token]
    until = torch.where(ends, place, queries).amin()  # the first token that ends the row
    kept = torch.minimum(torch.minimum(right, until), text.limit - state.count - 1) + 1
    kept = torch.where(state.finished[0], 0, kept)
    taken = place < kept

    # What is written behind the kept tokens is written again by the next step, or is not read.
    state.tokens.index_copy_(0, count, token[:, None])
    text.tokens.index_copy_(0, text.lookup.ngram + text.held + place, token)
    last = torch.where(kept > 0, token.gather(0, (kept - 1).clamp(min=0).view(1)), state.token.view(1))
    going = ~state.finished[0]
    first_bad = torch.where(taken & ~finite, count + 1, torch.iinfo(torch.int64).max).amin()
    bad = torch.where((state.status[2] == 0) & (taken & ~finite).any(), first_bad, state.status[2])
    if state.seen.shape[1] > 1:
        state.seen.scatter_(1, torch.where(taken, token, last)[None], True)
    state.count.add_(kept)
    state.finished.logical_or_((taken & ends).any() | (state.count >= text.limit))
    steps, drafted = state.status[3] + going, state.status[4] + (going & found) * (queries - 1)
    state.status.copy_(torch.stack([state.count, state.finished[0].long(), bad, steps, drafted]))
    state.token.copy_(last.view(1, 1))
    text.held.add_(kept)
    state.position.add_(kept)
    state.column.add_(kept)
    counter.sub_(queries - kept)
