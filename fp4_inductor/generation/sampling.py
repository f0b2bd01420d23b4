"""From logits to a token: pure functions of tensors, which a CUDA graph can replay.

The filters compute what the logits processors of Transformers compute, operation by operation, so that filtered scores are equal to the bit on a
CPU. Their numbers (a temperature, a top_p) are tensors and no constants: another number is no other graph.

Random numbers are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the seed as the key and (token, row) as
the counter. A draw depends on nothing else: not on a generator's state, on how many tokens are run at once, or on what other rows do.

Source: transformers.generation.logits_process (5.17 to 5.24).
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)
_ONE = 2.0**48  # a probability of 1 as an integer: sums of integers are the same in every order, and below 2**53 exact as float64
_WIDTH = 512  # tokens of the vocabulary in a block of ``largest`` and ``draw``


class Seen(Protocol):
    """What filters know beside scores: ``seen`` bool ``[B, V]``, the tokens of each row so far, and ``count`` int64 ``[]`` or ``[B, 1]``, how many were
    generated."""

    @property
    def seen(self) -> Tensor: ...

    @property
    def count(self) -> Tensor: ...


def temperature(scores: Tensor, value: Tensor) -> Tensor:
    """Scores ``[B, V]`` float32 divided by ``value`` ``[]`` float32."""
    return scores / value


def repetition_penalty(scores: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Scores of tokens in ``seen`` bool ``[B, V]`` made less likely by the factor ``value`` ``[]``."""
    return torch.where(seen, torch.where(scores < 0, scores * value, scores / value), scores)


def suppress(scores: Tensor, tokens: Tensor, active: Tensor | None = None) -> Tensor:
    """Scores of ``tokens`` bool ``[V]`` are -inf; only while ``active`` bool ``[]`` or ``[B, 1]``, if it is given."""
    return torch.where(tokens if active is None else tokens & active, -math.inf, scores)


def top_k(scores: Tensor, k: int) -> Tensor:
    """The ``k`` largest scores of a row stay, and what is equal to the least of them; the others are -inf."""
    return scores.masked_fill(scores < torch.topk(scores, min(k, scores.shape[-1]))[0][..., -1, None], -math.inf)


def top_p(scores: Tensor, rest: Tensor, keep: int = 1) -> Tensor:
    """The least likely tokens, whose probabilities sum to ``rest`` = 1 - top_p ``[]`` or less, are -inf; the ``keep`` likeliest never."""
    in_order, order = torch.sort(scores, descending=False)
    remove = in_order.softmax(dim=-1).cumsum(dim=-1) <= rest
    remove[..., -keep:] = False
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)


def min_p(scores: Tensor, share: Tensor, keep: int = 1) -> Tensor:
    """Tokens whose probability is below ``share`` ``[]`` of the likeliest one's are -inf; the ``keep`` likeliest never."""
    probabilities = torch.softmax(scores, dim=-1)
    remove = probabilities < share * probabilities.amax(dim=-1, keepdim=True)
    likeliest = torch.topk(probabilities, min(keep, scores.shape[-1]), dim=-1).indices
    return scores.masked_fill(remove.scatter(-1, likeliest, False), -math.inf)


def typical(scores: Tensor, mass: Tensor, keep: int = 1) -> Tensor:
    """Tokens whose information is nearest to the entropy stay, until their probabilities sum to ``mass`` ``[]`` (Meister et al., 2022)."""
    logs = torch.log_softmax(scores, dim=-1)
    entropy = -(logs * torch.exp(logs)).nansum(-1, keepdim=True)
    distance, order = torch.sort(torch.abs(-logs - entropy), descending=False)
    cumulative = scores.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (cumulative < mass).sum(dim=1).clamp(max=scores.shape[-1] - 1)
    remove = distance > distance.gather(1, last.view(-1, 1))
    remove[..., :keep] = False
    return scores.masked_fill(remove.scatter(1, order, remove), -math.inf)


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10. Words of 32 bits in int64 tensors of shapes that broadcast -> four words of 32 bits, as int64."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for i in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        a, b = (k0 + i * _STEPS[0]) & _LOW, (k1 + i * _STEPS[1]) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ a, low1, high0 ^ c3 ^ b, low0
    return c0, c1, c2, c3


def _product(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``x * m``, by 16 bits of ``m`` at a time: int64 holds no unsigned product of two words."""
    high, low = x * (m >> 16), x * (m & 0xFFFF)
    low = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (low >> 32), low & _LOW


def uniform(seed: Tensor, count: Tensor, rows: int) -> Tensor:
    """float64 ``[rows]`` in [0, 1), 53 bits each, for token ``count`` int64 ``[]`` under ``seed`` int64 ``[]``."""
    return uniform_at(seed, count.expand(rows), torch.arange(rows, device=seed.device))


def uniform_at(seed: Tensor, step: Tensor, row: Tensor) -> Tensor:
    """The same for each pair of a token ``step`` and a ``row``, int64 ``[N]``."""
    zero = torch.zeros_like(row)
    first, second, _, _ = philox((seed & _LOW, (seed >> 32) & _LOW), (step & _LOW, step >> 32, row, zero))
    return ((first << 21) | (second >> 11)).double() * 2.0**-53


def _blocks(scores: Tensor, rest: float) -> Tensor:
    """``[B, V]`` as ``[B, blocks, _WIDTH]``, filled up with ``rest``."""
    return torch.nn.functional.pad(scores, (0, -scores.shape[-1] % _WIDTH), value=rest).view(scores.shape[0], -1, _WIDTH)


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score of each row and the first token that has it, NaN above all: scores ``[B, V]`` -> ``[B]``, int64 ``[B]``.

    In two steps, because Inductor gives ``argmax`` of a row to one program: 32 us on an H100 for 151,936 tokens.
    """
    best, inside = _blocks(scores, -math.inf).max(-1)
    value, block = best.max(-1)
    return value, block * _WIDTH + inside.gather(1, block[:, None]).squeeze(1)


def draw(scores: Tensor, chance: Tensor) -> Tensor:
    """A token of each row, by inversion of its distribution: scores ``[B, V]`` float32, chance float64 ``[B]`` in [0, 1) -> int64 ``[B]``.

    A token with a score of -inf is never drawn. Probabilities are rounded down to multiples of 2**-48 of their sum, in integers, so that the result
    does not depend on the order of summation. Blocks of the vocabulary are looked through first, then the tokens of one: two short scans, no long one.
    """
    weights = (torch.softmax(scores, dim=-1).double() * _ONE).long()
    rows, vocabulary = weights.shape
    blocks = _blocks(weights, 0)
    upto = blocks.sum(-1).cumsum(-1)  # [B, blocks]
    total = upto[:, -1]
    target = torch.minimum((chance * total.double()).long(), total - 1)[:, None]
    block = (upto <= target).sum(-1, keepdim=True).clamp(max=blocks.shape[1] - 1)
    inside = blocks.gather(1, block[..., None].expand(rows, 1, _WIDTH)).squeeze(1)
    rest = target - (upto.gather(1, block) - inside.sum(-1, keepdim=True))
    token = block.squeeze(1) * _WIDTH + (inside.cumsum(-1) <= rest).sum(-1)
    return token.clamp(min=0, max=vocabulary - 1)  # of a row without a finite score, which the caller reports
