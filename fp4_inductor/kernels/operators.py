"""Importing this defines ``torch.ops.fp4_csrc``: before Inductor compiles a graph that calls one of its operators, or reads such a graph from its cache."""

from . import csrc  # noqa: F401
from .linear_chain import on_csrc as chain_on_csrc  # noqa: F401
from .moe import on_csrc  # noqa: F401
