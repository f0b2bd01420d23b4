"""Triton's interpreter, switched on and made quicker. Import this before anything imports Triton, in a process of its own (own_process.py).

The interpreter replaces the language's functions again in every call of a device function, by far most of its time; here once a launch. Of what is left, most
is types: blocks of a few shapes are described anew for every operation; here once a process. It also computes in 64 bits whether integers overflow, for an
assertion that it then leaves out (``device_assert`` without ``debug``), and casts and broadcasts what has the type and shape already.
"""

from __future__ import annotations

import dataclasses
import functools
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _patch_once_a_launch() -> None:
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @functools.cache
    def languages(fn) -> frozenset[str]:
        """What ``patch`` replaces functions of, by the names under which ``fn`` sees it."""
        return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values()))

    def patch_once(fn):
        if patched and languages(fn) <= patched:
            return None  # of a device function: nobody reads it
        patched.update(languages(fn))
        return patch(fn)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()  # a launch takes back at its end what it replaced
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh


def _describe_once() -> None:
    describe, block, np_dtype = tl.tensor.__init__, tl.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple, dict] = {}
    shapes: dict[tuple, tuple] = {}
    np_dtypes: dict[str, object] = {}

    def block_once(self, element_ty, shape):
        key = element_ty.name, *(s.value if isinstance(s, tl.constexpr) else s for s in shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key], element_ty=element_ty)

    def describe_once(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            describe(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def np_dtype_once(tt_dtype):
        key = tt_dtype.scalar.name
        if key not in np_dtypes:
            np_dtypes[key] = np_dtype(tt_dtype)
        return np_dtypes[key]

    tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype = block_once, describe_once, np_dtype_once


def _leave_out_what_changes_nothing() -> None:
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value

    def cast_to_another(self, input, dst_ty, *args, **kwargs):
        return input if input.dtype is dst_ty else cast(self, input, dst_ty, *args, **kwargs)

    def broadcast_to_another(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        same = a.is_block() and b.is_block() and a.shape is b.shape  # blocks that are described once have one shape
        return (lhs, rhs) if same else broadcast(self, lhs, rhs)

    TritonSemantic.cast, TritonSemantic.broadcast_impl_value = cast_to_another, broadcast_to_another


_patch_once_a_launch()
_describe_once()
_leave_out_what_changes_nothing()
