"""F2: modules that hold quantized weights as plain buffers and call ``fp4.*`` ops in forward."""

from .fp8 import FP8Linear
from .linear import FP4Linear
from .packed import PackedFP4Linear, PackedWeight, pack

__all__ = ["FP4Linear", "FP8Linear", "PackedFP4Linear", "PackedWeight", "pack"]
