"""What a call of ``fp4.cached_attention`` or ``fp4.decode_attention`` may ask for, in words (``form`` of :class:`.kernel.Call`): kernels name it.

``select.cached_form`` and ``select.attention_form`` say it.
"""

from __future__ import annotations


def cache_in(name: str) -> str:
    """A cache of this format."""
    return f"a cache in {name}"


OVERWRITTEN = "exact tokens of which the new ones would overwrite some"
NO_COUNTERS = "no counters of arrival"
EMPTY = "a cache that is known to be empty"
NOT_PLAIN = "a window that ends within the prompt, a mask, a soft-cap or sinks"  # of an empty cache alone
TURNS = "more new tokens than the ring keeps besides its window"
# What cuda_step_attention does not take, and other kernels of a decode step do.
SEVERAL_QUERIES = "several queries"
OTHER_ROTATION = "a rotation of other than 64 or 128 channels"
NOT_CONTIGUOUS = "a cache that is not contiguous"
ODD_SLOTS = "codes of slots that are no multiple of 8"
WIDE_PROLOGUE = "norms or angles of another dtype than the query"
OTHER_SIZE = "a cache of a size at which clusters are behind"
NOT_BY_CLUSTERS = (SEVERAL_QUERIES, OTHER_ROTATION, NOT_CONTIGUOUS, ODD_SLOTS, WIDE_PROLOGUE, OTHER_SIZE)


SHORT = 4608  # slots of a cache for 4,096 tokens of a prompt and an answer


def suits_clusters(programs: int, slots: int, format: str) -> bool:
    """Is cuda_step_attention ahead over a cache for ``programs`` KV heads of all sequences, of ``slots`` tokens each?

    Over short caches of up to 132 heads. H100, 520 tokens of one sequence of 8 heads: 5.9 us (triton_cached_attention 8.9), in k8v4 6.9 (8.7); of eight
    sequences 11.8 (16.8). In the model's dtype of up to 264, two on a multiprocessor. H200, 256 heads of 520 tokens: 24.9 us (28.5), but fp8 18.1 (17.7) and
    k8v4 19.2 (16.5). Over many tokens of many sequences. H200, 64 heads of 8,192 tokens: 67.9 us (78.1), fp8 40.7 (46.3); in k8v4 from 256 heads on.
    Few heads of long caches have too few blocks.
    """
    if slots <= SHORT and programs <= (132 if format else 264):
        return True
    heads, tokens = (133, 1 << 21) if format == "k8v4" else (32, 1 << 19)  # at least, of all sequences
    return programs >= heads and programs * slots >= tokens


CODES = "keys and values in 8 bits"  # of fp4.decode_attention
OTHER_MASK = "attention without a bool mask that all heads share"  # of fp4.decode_attention
