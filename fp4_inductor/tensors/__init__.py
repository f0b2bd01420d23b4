"""F2: tensor subclasses, the API and checkpoint type of quantized weights."""

from .foreign_sparse24 import read_sparse24, write_sparse24
from .nvfp4 import NVFP4Tensor
from .sparse24 import Sparse24NVFP4Tensor

__all__ = ["NVFP4Tensor", "Sparse24NVFP4Tensor", "read_sparse24", "write_sparse24"]
