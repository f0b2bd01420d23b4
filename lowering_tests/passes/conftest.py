"""Compile something, see the graph after the passes and what each pattern counted."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp4_inductor  # noqa: F401

for _folder in Path(__file__).resolve().parents[:2]:  # idioms; fake_cuda
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))


class Recorder(CustomGraphPass):
    """Last pass of post-grad: the graph's calls, one line each, with names by first use."""

    def __init__(self):
        self.texts: list[str] = []

    def __call__(self, graph):
        names: dict[torch.fx.Node, str] = {}
        lines = []
        for node in graph.nodes:
            if node.op == "placeholder":
                names[node] = f"in{sum(n.op == 'placeholder' for n in names)}"
            elif node.op == "get_attr":
                names[node] = "constant"
            elif node.op == "call_function":
                args = torch.fx.map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))
                names[node] = f"v{len(lines)}"
                shown = [str(a) for a in args[0]] + [f"{k}={v}" for k, v in args[1].items() if k != "device"]
                lines.append(f"{names[node]} = {node.target}({', '.join(shown)})")
            else:
                lines.append("return " + ", ".join(names[n] for n in node.all_input_nodes))
        self.texts.append("\n".join(lines))

    def uuid(self):
        return None


class _Name(str):
    def __repr__(self):
        return str(self)


@dataclass
class Compiled:
    result: torch.Tensor
    matches: dict[str, int]
    graph: str
    graphs: list[str] = field(repr=False)


def _run_after_passes(module, example_inputs):
    """A backend that is Inductor up to and including the post-grad passes, and then just runs the graph: no code generation."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor.compile_fx import _recursive_post_grad_passes, compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    def inner(gm, inputs, **kwargs):
        view_to_reshape(gm)
        with torch._inductor.virtualized.V.set_fake_mode(torch._guards.detect_fake_mode(inputs)):
            _recursive_post_grad_passes(gm, is_inference=True)
        return make_boxed_func(gm.forward)

    return compile_fx(module, example_inputs, inner_compile=inner)


@pytest.fixture
def compiled():
    """``compiled(fn, *args, config={}, generate=False, **compile_options)``: compile without caches, run once, report.

    Without ``generate`` the graph after the passes is run as it is, which spares a C++ compiler call per test.
    """
    from fp4_inductor import passes

    def run(fn, *args, config=None, generate=False, **options) -> Compiled:
        torch._dynamo.reset()
        passes.reset_matches()
        recorder = Recorder()
        patches = {"force_disable_caches": True, "post_grad_custom_post_pass": recorder, **(config or {})}
        with torch.no_grad(), inductor_config.patch(patches):
            result = torch.compile(fn, fullgraph=True, backend="inductor" if generate else _run_after_passes, **options)(*args)
        return Compiled(result, passes.matches(), recorder.texts[-1], recorder.texts)

    return run
