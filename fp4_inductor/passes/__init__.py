"""F3: graph passes. They turn what users and other libraries write into the ops of ``torch.ops.fp4``."""

from .counters import matches, reset_matches

__all__ = ["matches", "register", "reset_matches"]


def register() -> None:
    """Install the patterns and the cache salt. Called once, when Inductor is first imported."""
    from .._torch.fx import on_each_graph
    from . import dequantize_matmul, glu, identity, siblings, tables

    tables.register()
    dequantize_matmul.register()
    on_each_graph(siblings.merge)
    on_each_graph(glu.fuse)
    identity.register()
