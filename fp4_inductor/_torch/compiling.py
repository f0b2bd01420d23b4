"""Was an error raised because something could not be compiled?"""

from __future__ import annotations

__all__ = ["is_compile_error"]


def is_compile_error(error: BaseException) -> bool:
    """True for what Dynamo or a backend raises before any of the compiled code has run."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException)
