"""Run what Inductor generates for CUDA, on a CPU: its wrapper as it is, its Triton kernels in Triton's interpreter.

fake_cuda.py gives the code of a compiled model, this module runs it on real tensors. The interpreter must be switched on
(interpreter.py) before Triton is imported, so tests call this from a process of their own (lowerings/executed_graphs.py).
What the interpreter cannot do is left out: inline assembly (kernels have a form without), E4M3 conversion of torch's fusions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from lowering_tests import fake_cuda

_DECORATOR = re.compile(r"^@triton_heuristics\..*?^(?=@triton\.jit)", re.S | re.M)
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.S)
_BLOCKS = {"XBLOCK": 16, "YBLOCK": 64, "R0_BLOCK": 64}


class _Launcher:
    """Stands for one entry of ``async_compile.triton``."""

    def __init__(self, name: str, source: str, folder: Path, launched: list[str]):
        import triton.language as tl

        path = folder / f"{name}_{len(launched)}_{len(list(folder.iterdir()))}.py"
        path.write_text(_DECORATOR.sub("", source).replace("triton_helpers.set_driver_to_gpu()", ""))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.libdevice = tl.math  # extern functions are not interpreted; these have the same names
        module.triton_helpers.max2 = tl.max  # torch's own is interpreted element by element
        self.name, self.kernel, self.launched = name, getattr(module, name), launched
        self.names = list(inspect.signature(self.kernel.fn).parameters)
        self.template = "triton_heuristics.template(" in source

    def run(self, *args, stream) -> None:
        blocks = {n: _BLOCKS[n] for n in self.names if n in _BLOCKS}
        if list(blocks) == ["XBLOCK"] and "_poi_" in self.name:
            blocks["XBLOCK"] = 2048
        given = self.names[: len(self.names) - len(blocks)]
        if self.template:
            grid, args = tuple(args[len(given) :]), args[: len(given)]
        else:
            bound = dict(zip(given, args, strict=True))
            grid = tuple(-(-int(bound[f"{d}numel"]) // blocks[f"{d.upper()}BLOCK"]) for d in "xy" if f"{d}numel" in bound)
        self.launched.append(self.name)
        self.kernel[grid](*args, **blocks)


@dataclass
class Executed:
    """``outputs`` of the generated code, ``wanted``: of the graph it came from, by the operators' CPU kernels; ``launched``: kernels in order."""

    outputs: list[Tensor]
    wanted: list[Tensor]
    launched: list[str]
    code: str


def _unwritten(size, stride, dtype) -> Tensor:
    t = torch.empty_strided(size, stride, dtype=dtype)
    return t.fill_(float("nan")) if dtype.is_floating_point and dtype.itemsize > 1 else t


def run(code: str, args: list) -> tuple[list[Tensor], list[str]]:
    """``(outputs, names of the Triton kernels launched)`` of one generated module on CPU tensors ``args``."""
    launched: list[str] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for owner, name in ((torch.cuda, "_DeviceGuard"), (torch.cuda, "set_device")):
            stack.enter_context(mock.patch.object(owner, name, return_value=contextlib.nullcontext()))
        names = {"_launcher": lambda name, source: _Launcher(name, source, Path(folder), launched)}
        text = _KERNEL.sub(lambda m: f"_launcher({m[1]!r}, {m[2]!r})", code)
        text = re.sub(r"^from torch\._C import _cuda_getCurrentRawStream.*$", "get_raw_stream = int", text, flags=re.M)
        text = text.replace("async_compile.wait(globals())", "").replace("device='cuda:0'", "device='cpu'").replace("device(type='cuda', index=0)", "'cpu'")
        exec(compile(text, "<generated>", "exec"), names)
        names["empty_strided_cuda"] = _unwritten
        return list(names["call"](list(args))), launched


def _real(fake: object, values: Callable[[object], Tensor | None]) -> object:
    """A CPU tensor of the fake one's kind: bytes, positive block scales, activations of ordinary size."""
    if not isinstance(fake, Tensor):
        return int(fake)
    size = [int(s) for s in fake.shape]
    made = values(fake)
    if made is None and fake.dtype == torch.uint8:
        made = torch.randint(0, 256, size, dtype=torch.uint8)
    if made is None and fake.dtype == torch.float8_e4m3fn:
        made = torch.randint(0x20, 0x50, size, dtype=torch.uint8).view(fake.dtype)
    if made is None:
        made = torch.randn(size).to(fake.dtype) if len(size) else torch.full(size, 0.01, dtype=fake.dtype)
    return made.as_strided(size, [int(s) for s in fake.stride()])


def execute(build, shapes, *, mark=None, values=lambda fake: None, cc=(8, 0), csrc=fake_cuda.NOT_COMPILED, **options) -> Executed:
    """Compile ``build()`` for a pretended GPU and run the result here on random numbers.

    Args:
        build, shapes, mark, options: see :func:`fake_cuda.generated_code`.
        values: for a fake input, the real one, or None for random numbers.
    """
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.Graph) -> None:
        graphs.append(torch.fx.GraphModule(graph.owning_module, _on_cpu(graph)))

    with fake_cuda.code_generation(cc, {"post_grad_custom_post_pass": keep}, csrc) as out:
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
        if mark is not None:
            mark(*inputs)
        fakes = fake_cuda.call(torch.compile(build(), fullgraph=True, **options), *inputs)
    args = [_real(f, values) for f in fakes]
    wanted = graphs[0](*[a.clone() if isinstance(a, Tensor) else a for a in args])
    outputs, launched = run(out[0], args)
    return Executed(outputs, [w for w in wanted if isinstance(w, Tensor)], launched, out[0])


def _on_cpu(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy whose factory calls make CPU tensors."""
    copy = torch.fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for node in copy.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    return copy
