"""sdpa: torch's scaled_dot_product_attention, for a CPU, and for many queries over codes, or over a mask that heads do not share."""

from __future__ import annotations

from ...ops import decode_attention as contract
from ..forms import Launches
from ..kernel import ANY, BY_LIBRARY, IN_CI, Kernel, On

sdpa = contract.by_library
_WHY = "F.scaled_dot_product_attention takes every mask, width and dtype"
KERNELS = (
    Kernel(
        "decode_attention", "sdpa", "library", (On(0, 129, IN_CI, _WHY),), ANY, k_multiple=1, batch=BY_LIBRARY, form=Launches("decode_attention.by_sdpa:sdpa")
    ),
)  # fmt: skip
