"""F2: tensor subclasses, the API and checkpoint type of quantized weights."""

from .nvfp4 import NVFP4Tensor
from .sparse24 import Sparse24NVFP4Tensor

__all__ = ["NVFP4Tensor", "Sparse24NVFP4Tensor"]
