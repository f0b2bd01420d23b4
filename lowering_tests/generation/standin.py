"""A device that captures and replays on a CPU, as CUDA graphs do: a capture runs Python and no kernel, a replay runs kernels and no Python.

A capture records the ATen operators with the very tensors they read and write. Reading a value on the host during a capture is an error, as it is on
CUDA. What the capture wrote into older tensors is taken back at its end, because on CUDA it would not have been written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp4_inductor._replay import Host

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self.own: set[int] = set()  # storages that were made inside
        self.before: dict[int, tuple] = {}  # older storages that were written, and what they held

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in READS:
            raise RuntimeError(f"{function} is not permitted when a step is being captured")
        for argument, value in zip(function._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(value):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in self.own and storage.data_ptr() not in self.before:
                        self.before[storage.data_ptr()] = (storage, storage.clone())
        result = function(*args, **kwargs)
        inputs = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in inputs]
        self.own |= {t.untyped_storage().data_ptr() for t in made}
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments)
        if made or writes:  # else it is a view, which a replay has already
            self.calls.append((function, args, kwargs, result, made))
        return result


class _Graph:
    def __init__(self, calls: list[tuple]):
        self.calls = calls
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, result, made in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                if any(old is tensor for tensor in made):
                    old.copy_(new)


class Replaying(Host):
    """``ahead``: as on CUDA, one block is queued before the host looks at the one before."""

    ahead = 1
    captures = True

    def __init__(self):
        self.graphs: list[_Graph] = []
        self.aside_runs = 0

    def aside(self, step: Any) -> None:
        self.aside_runs += 1
        step()

    def capture(self, step: Any) -> _Graph:
        recorder = _Recorder()
        try:
            with recorder:
                step()
        finally:
            for storage, held in recorder.before.values():
                storage.copy_(held)
        self.graphs.append(_Graph(recorder.calls))
        return self.graphs[-1]


class Again(Host):
    """A device whose graphs are the Python functions that were captured."""

    captures = True

    def __init__(self):
        self.replays = 0

    def capture(self, step):
        def replay():
            self.replays += 1
            step()

        return type("Graph", (), {"replay": staticmethod(replay)})()
