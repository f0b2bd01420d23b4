"""F1: the contract of each op in ``torch.ops.fp4``. Importing this package registers schemas, fakes and gradients."""

from . import bmm, dequantize, linear, quantize
from .contract import CONTRACTS, OpContract

__all__ = ["CONTRACTS", "OpContract", "bmm", "dequantize", "linear", "quantize"]
