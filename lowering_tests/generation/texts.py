"""Texts in which drafts are looked for, and how many are asked for: what tests of prompt lookup on a CPU and on a GPU share."""

from __future__ import annotations

NGRAM = 60  # a text that a test tells matches in more tokens than another place does


def drafting(tokens: int, ngram: int = NGRAM) -> dict:
    return dict(prompt_lookup_num_tokens=tokens, max_matching_ngram_size=ngram)


def spelled_wrong(text, every: int, first: int = 9):
    """``text`` with another token in every so many places."""
    text = text.clone()
    text[:, first + every - 1 :: every] = (text[:, first + every - 1 :: every] + 1) % 128
    return text
