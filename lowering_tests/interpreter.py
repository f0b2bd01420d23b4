"""Triton's interpreter, switched on and made quicker. Import this before anything imports Triton, in a process of its own (own_process.py).

The interpreter replaces the language's functions again in every call of a device function, by far most of its time; here once a launch.
"""

from __future__ import annotations

import functools
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from triton import language as tl
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


_patch_once_a_launch()
