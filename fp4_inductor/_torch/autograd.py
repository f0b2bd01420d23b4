"""What a kernel returns to autograd, and how a function goes on below it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def returns_no_view(kernel: Callable) -> Callable:
    """``kernel``, whose results are no views to autograd, however it made them.

    A kernel computes ``[M, N]`` and reshapes that to ``[..., N]``. Autograd would record the reshape as a view made inside a function of its
    own, and refuses to write into such a result: ``y += residual`` would fail in training.
    """

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return kernel(*args, **kwargs)

    return call


def below_autograd() -> Any:
    """A context in which an op's own kernel is called: the one that autograd's has been in front of."""
    return torch._C._AutoDispatchBelowAutograd()


def below_torch_function() -> Any:
    """A context in which subclasses of Tensor are tensors to every function: their ``__torch_function__`` is not called."""
    return torch._C.DisableTorchFunctionSubclass()
