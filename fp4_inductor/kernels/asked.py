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
LONG_ALONE = "few sequences in a long cache"
MANY_SHORT = "many sequences in a short cache"
SIZES = (LONG_ALONE, MANY_SHORT)  # every kernel of a step takes them; some are faster at one
NOT_BY_CLUSTERS = (SEVERAL_QUERIES, OTHER_ROTATION, NOT_CONTIGUOUS, ODD_SLOTS, WIDE_PROLOGUE)


def sizes(programs: int, slots: int, rounded: bool) -> str:
    """Of a cache with so many KV heads of all sequences: one of SIZES, or nothing.

    On an H200, us of cuda_step_attention and of the kernel that served before: 8 heads, bfloat16, 4,096 tokens 11.7 and 12.5, 8,192 tokens 17.5 and 16.7;
    k8v4, 8,192 tokens 14.1 and 13.9, 32,768 tokens 36.3 and 27.4; 256 heads, k8v4, 520 tokens 19.2 and 17.1, 4,096 tokens 65.7 and 67.7.
    """
    if programs < 16 and slots > (12288 if rounded else 6144):
        return LONG_ALONE
    return MANY_SHORT if programs > 132 and slots < 2048 else ""


CODES = "keys and values in 8 bits"  # of fp4.decode_attention
