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

    cuda_step_attention takes less time than the kernel that serves otherwise also at a few tokens (520 on an H200: 6.0 for 8.9 us), but a step of an 8B
    model takes more with it (H100: 2.53 for 2.45 ms): its shared memory leaves no room for the next product, which then does not begin early. So it serves
    where it is ahead by more than that costs, on an H200 with 64 heads of 8,192 tokens 67.9 for 78.1 us in bfloat16, 40.7 for 46.3 in fp8; in k8v4 from
    256 heads of 8,192 tokens on, 115.3 for 121.4.
    """
    return programs >= 32 and programs * slots >= (1 << 21 if format == "k8v4" else 1 << 19) and (programs > 132 or format != "k8v4")


CODES = "keys and values in 8 bits"  # of fp4.decode_attention
