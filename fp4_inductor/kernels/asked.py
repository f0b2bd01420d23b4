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
BULK = "many tokens of many sequences"  # every kernel of a step takes them; cuda_step_attention is ahead there
NOT_BY_CLUSTERS = (SEVERAL_QUERIES, OTHER_ROTATION, NOT_CONTIGUOUS, ODD_SLOTS, WIDE_PROLOGUE)


def is_bulk(programs: int, slots: int, format: str) -> bool:
    """Has a cache for ``programs`` KV heads of all sequences, of ``slots`` tokens each, BULK?

    At 520 tokens cuda_step_attention takes 6.0 us on an H200, the kernel that serves there 8.9. A step of an 8B model takes longer with it all the same
    (H100, batch 1: 2.53 and 2.45 ms). That was not profiled; its 100 KB of shared memory a block probably keep PDL from overlapping the next product with it.
    So it serves where it is ahead by more. On an H200 with 64 heads of 8,192 tokens: bfloat16 67.9 and 78.1 us, fp8 40.7 and 46.3. In k8v4 it is ahead from
    256 heads of 8,192 tokens on: 115.3 and 121.4.
    """
    heads, tokens = (133, 1 << 21) if format == "k8v4" else (32, 1 << 19)  # at least, of all sequences
    return programs >= heads and programs * slots >= tokens


CODES = "keys and values in 8 bits"  # of fp4.decode_attention
