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
FEW, LONGEST = 12, 8704  # KV heads of all sequences that are attended to beside linear_chain; slots for 8,192 tokens of a prompt and an answer


def suits_clusters(programs: int, slots: int, format: str) -> bool:
    """Is cuda_step_attention ahead over a cache for ``programs`` KV heads of all sequences, of ``slots`` tokens each?

    Over short caches of up to 132 heads. H100, 520 tokens of one sequence of 8 heads: 5.9 us (triton_cached_attention 8.9), in k8v4 6.9 (8.7); of eight
    sequences 11.8 (16.8). In the model's dtype of up to 264, two on a multiprocessor. H200, 256 heads of 520 tokens: 24.9 us (28.5), but fp8 18.1 (17.7) and
    k8v4 19.2 (16.5).

    Over long caches of up to 12 heads, because it runs beside linear_chain. H200, a layer of a step, one sequence of 8 heads: 8,192 tokens 4 us less, 16,384
    level. And of 32 to 132 heads, which fill the multiprocessors: 32 of 8,192 tokens 14 us less, in k8v4 5; 16 are level. And of more with very many tokens.
    """
    if slots <= SHORT and programs <= (132 if format else 264):
        return True
    if programs <= 132:
        return programs >= 32 or (programs <= FEW and slots <= LONGEST)
    return programs * slots >= (1 << 21 if format == "k8v4" else 1 << 19)


CODES = "keys and values in 8 bits"  # of fp4.decode_attention
OTHER_MASK = "attention without a bool mask that all heads share"  # of fp4.decode_attention
