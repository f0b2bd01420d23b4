"""Run a callback when Inductor, or another module, is first imported, without importing it.

``import fp4_inductor`` must cost nothing, and a model that never mentions this package (a torchao checkpoint, say) must
still be rewritten by ``torch.compile`` alone; so the registration waits for ``torch._inductor.compile_fx``, the module
every compilation goes through.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable

_TRIGGER = "torch._inductor.compile_fx"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the trigger module through the other finders, and wraps its loader's ``exec_module``.

    It stays until the module runs: a library that asks whether another is installed finds a module that it does not import.
    """

    def __init__(self, trigger: str, callback: Callable[[], None]):
        self.trigger, self.callback = trigger, callback
        self._own = threading.local()  # asking, in this thread

    def find_spec(self, fullname, path, target=None):
        if fullname != self.trigger or getattr(self._own, "asking", False):
            return None
        self._own.asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._own.asking = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            self.callback()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_inductor_loads(callback: Callable[[], None]) -> None:
    """Call ``callback()`` right after Inductor's compile module is imported; now, if it already is."""
    when_loads(_TRIGGER, callback)


def when_loads(module: str, callback: Callable[[], None]) -> None:
    """Call ``callback()`` right after ``module`` is imported; now, if it already is."""
    if module in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _AfterImport(module, callback))
