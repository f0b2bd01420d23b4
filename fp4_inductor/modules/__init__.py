"""F2: modules that hold quantized weights as plain buffers and call ``fp4.*`` ops in forward."""

from .experts import FP4Experts, FP4ExpertWeight
from .linear import FP4Linear

__all__ = ["FP4ExpertWeight", "FP4Experts", "FP4Linear"]
