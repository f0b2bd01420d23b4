"""F3: graph passes. They turn what users and other libraries write into the ops of ``torch.ops.fp4``."""

from .counters import matches, reset_matches

__all__ = ["matches", "register", "reset_matches"]


def register() -> None:
    """Install the patterns and the cache salt. Called once, when Inductor is first imported."""
    from . import dequantize_matmul, floats, identity, moe, tables

    tables.register()
    floats.register()
    moe.register()
    dequantize_matmul.register()
    identity.register()
