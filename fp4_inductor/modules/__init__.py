"""F2: modules that hold quantized weights as plain buffers and call ``fp4.*`` ops in forward."""

from .experts import FP4Experts, FP4ExpertWeight
from .fp8 import FP8Linear
from .linear import FP4Linear
from .siblings import SiblingLinear, SiblingWeight, pack_siblings
from .sparse24 import Sparse24ExpertWeight, Sparse24Linear, Sparse24Weight

BY_STORAGE = {cls.storage().name: cls for cls in (FP4Linear, Sparse24Linear, FP8Linear)}
EXPERTS_BY_STORAGE = {cls.storage().name: cls for cls in (FP4ExpertWeight, Sparse24ExpertWeight)}

__all__ = [
    "BY_STORAGE",
    "EXPERTS_BY_STORAGE",
    "FP4ExpertWeight",
    "FP4Experts",
    "FP4Linear",
    "FP8Linear",
    "SiblingLinear",
    "SiblingWeight",
    "Sparse24ExpertWeight",
    "Sparse24Linear",
    "Sparse24Weight",
    "pack_siblings",
]
