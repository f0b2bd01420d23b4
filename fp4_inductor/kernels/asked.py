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
# What the Triton kernel of a decode step takes, and the CUDA kernel does not.
SEVERAL_QUERIES = "several queries"
OTHER_ROTATION = "a rotation of other than 64 or 128 channels"
NOT_CONTIGUOUS = "a cache that is not contiguous"
ONLY_TRITON = (SEVERAL_QUERIES, OTHER_ROTATION, NOT_CONTIGUOUS)
CODES = "keys and values in 8 bits"  # of fp4.decode_attention
