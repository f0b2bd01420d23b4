"""The house rules as a test: who may import whom, private torch in one place, file sizes, no ``assert`` as validation.

The rules read sources, never import them, so they also see imports inside functions and under TYPE_CHECKING.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fp4_inductor"

# Higher may import lower. The side modules are usable by all and know only each other.
FLOORS = [
    {"formats"},
    {"ops"},
    {"tensors", "modules", "kernels"},
    {"passes", "lowerings"},
    {"models", "checkpoint", "integrations", "generation", "decoding"},
    {"api", "explain", "regimes", "report", "__init__"},
    {"cli", "__main__"},
]
SIDE = {"_text", "_replay", "errors", "config", "ranges", "_salt", "_sources", "_engines", "_exchange", "_journal", "_notice", "_renamed"}
PRIVATE = "_torch"
VLLM_DOOR = f"{PACKAGE}.integrations.vllm.engine"
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# Within a floor only these pairs know each other.
NEIGHBOURS = {
    ("modules", "tensors"),
    ("api", "explain"),
    ("__init__", "api"),
    ("__init__", "explain"),
    ("__init__", "report"),
    ("__init__", "regimes"),
    ("__main__", "cli"),
    ("checkpoint", "models"),
    ("integrations", "models"),
    ("integrations", "checkpoint"),
    ("integrations", "decoding"),
    ("generation", "decoding"),
    ("models", "decoding"),
    ("models", "generation"),
    ("lowerings", "passes"),
}
# F3 sees kernels through their registry, the selection, and their forms, which say what is inlined into generated code. Never what launches them.
KERNEL_DOORS = {"kernel", "registry", "select", "forms", "operators"}

LINES = 600
PRIVATE_TORCH_ATTRIBUTES = {"_inductor", "_dynamo", "_functorch", "_library", "_subclasses", "_higher_order_ops", "_export", "_prims", "_decomp", "_guards"}

Sources = dict[str, str]


def package_sources() -> Sources:
    """``{"fp4_inductor.ops.linear": source, "fp4_inductor.ops.__init__": source, ...}``"""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts): f.read_text() for f in files}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports(module: str, source: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, relative ones made absolute, ``from a import b`` as ``a.b`` when that is a module."""
    package = module.rsplit(".", 1)[0]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                is_module = name in known or f"{name}.__init__" in known or (base.split(".")[0] == "torch" and alias.name.startswith("_"))
                yield node.lineno, name if is_module else base
        elif isinstance(node, ast.Call) and node.args and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("import_module", "__import__"):
            name = getattr(node.args[0], "value", None)
            if isinstance(name, str) and not name.startswith("."):
                yield node.lineno, name


def room(name: str) -> str:
    """``fp4_inductor.ops.linear`` -> ``ops``; the package itself -> ``__init__``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def why_forbidden(importer: str, target: str) -> str | None:
    """The rule that ``importer`` breaks by importing ``target`` (both modules of the package), or None."""
    a, b = room(importer), room(target)
    if a == b:
        return None
    if a == PRIVATE:
        return "_torch imports nothing of ours"
    if b == PRIVATE or b in SIDE:
        return "a side module knows only side modules" if a in SIDE and b == PRIVATE else None
    if a in SIDE:
        return "a side module knows only side modules"
    if a not in FLOOR_OF or b not in FLOOR_OF:
        return f"{a if a not in FLOOR_OF else b} has no floor: give it one in this test"
    if FLOOR_OF[a] < FLOOR_OF[b]:
        return f"F{FLOOR_OF[a]} {a} imports upward, from F{FLOOR_OF[b]} {b}"
    if FLOOR_OF[a] == FLOOR_OF[b] and (a, b) not in NEIGHBOURS:
        return f"{a} and {b} do not know each other"
    if FLOOR_OF[a] == 3 and b == "kernels":
        inner = target.split(".")[2:]
        if inner and inner[0] in KERNEL_DOORS:
            return None
        return "F3 sees kernels through kernels.kernel, kernels.registry, kernels.select and kernels.forms"
    return None


def is_private_torch(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "torch" and any(p.startswith("_") for p in parts[1:])


def violations(sources: Sources) -> list[str]:
    known = set(sources)
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        in_torch_room = room(module) == PRIVATE
        graph[module] = set()
        for line, name in imports(module, source, known):
            if is_private_torch(name) and not in_torch_room:
                found.append(f"{module}:{line}: private torch ({name}) is imported only in {PACKAGE}/_torch")
            if name.split(".")[0] == "vllm" and module != VLLM_DOOR:
                found.append(f"{module}:{line}: names of vLLM come from {VLLM_DOOR} only")
            if name.split(".")[0] == PACKAGE:
                rule = why_forbidden(module, name)
                if rule:
                    found.append(f"{module}:{line}: {rule}")
                target = f"{name}.__init__" if f"{name}.__init__" in known else name
                if target != module:
                    graph[module].add(target)
        for node in nodes(source):
            if isinstance(node, ast.Assert):
                found.append(f"{module}:{node.lineno}: assert is not validation (python -O removes it)")
            elif isinstance(node, ast.Attribute) and node.attr in PRIVATE_TORCH_ATTRIBUTES and getattr(node.value, "id", "") == "torch" and not in_torch_room:
                found.append(f"{module}:{node.lineno}: private torch (torch.{node.attr}) is used only in {PACKAGE}/_torch")
        lines = source.count("\n")
        if lines > LINES:
            found.append(f"{module}: {lines} lines, at most {LINES}")
    found += [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan), each as a sorted list of names."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out: list[list[str]] = []

    def visit(v: str) -> None:
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in sorted(graph.get(v, ())):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            component = []
            while True:
                w = stack.pop()
                component.append(w)
                if w == v:
                    break
            if len(component) > 1:
                out.append(sorted(component))

    for v in sorted(graph):
        if v not in index:
            visit(v)
    return out


def test_the_package_keeps_the_rules():
    sources = package_sources()
    assert len(sources) > 20, "the sources were not found"
    assert violations(sources) == []


PLANTED = {
    "vLLM elsewhere": ("integrations.vllm.bad", "def f():\n    from vllm.config import VllmConfig", "names of vLLM come from"),
    "upward": ("formats.bad", "from ..ops import linear", "imports upward"),
    "upward inside a function": ("ops.bad", "def f():\n    from fp4_inductor.kernels import register", "imports upward"),
    "tensors know kernels": ("tensors.bad", "from ..kernels import register", "do not know each other"),
    "kernels know tensors": ("kernels.bad", "from ..tensors.nvfp4 import NVFP4Tensor", "do not know each other"),
    "kernels know tensors by importlib": ("kernels.bad", "import importlib\nimportlib.import_module('fp4_inductor.tensors')", "do not know each other"),
    "a pass knows a launcher": ("passes.bad", "from ..kernels.linear import cpu", "F3 sees kernels"),
    "a lowering knows a launcher": ("lowerings.bad", "from ..kernels.linear.cpu import linear", "F3 sees kernels"),
    "a pass knows a kernel's source": ("passes.bad", "from ..kernels.linear import triton_gemv", "F3 sees kernels"),
    "a side module knows a floor": ("config.bad", "from ..formats import nvfp4", "a side module knows only"),
    "private torch": ("passes.bad", "from torch._inductor import config", "private torch"),
    "private torch by import": ("ops.bad", "import torch._dynamo", "private torch"),
    "private torch by from": ("ops.bad", "from torch import _dynamo", "private torch"),
    "private torch below a public name": ("ops.bad", "from torch.utils._pytree import tree_map", "private torch"),
    "private torch by attribute": ("ops.bad", "import torch\ntorch._dynamo.reset()", "private torch"),
    "private torch by importlib": ("ops.bad", "import importlib\nimportlib.import_module('torch._inductor.ir')", "private torch"),
    "_torch knows us": ("_torch.bad", "from ..errors import FP4Error", "_torch imports nothing of ours"),
    "no floor": ("newroom.bad", "from ..formats import nvfp4", "has no floor"),
    "the api knows the command line": ("explain.bad", "from ..cli import screen", "imports upward"),
    "assert": ("ops.bad", "def f(x):\n    assert x > 0", "assert is not validation"),
    "long file": ("ops.bad", "x = 1\n" * (LINES + 1), f"at most {LINES}"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    module, source, message = PLANTED[name]
    sources = package_sources()
    clean = violations(sources)
    found = [v for v in violations({**sources, f"{PACKAGE}.{module}": source}) if v not in clean]
    assert len(found) == 1
    assert message in found[0]
    assert f"{PACKAGE}.{module}" in found[0]


def test_a_planted_cycle_is_found():
    sources = {**package_sources(), f"{PACKAGE}.ops.one": "from . import two", f"{PACKAGE}.ops.two": "def f():\n    from .one import x"}
    assert [v for v in violations(sources) if "ops.one" in v] == ["import cycle: fp4_inductor.ops.one -> fp4_inductor.ops.two"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "lowerings.good",
            "from ..kernels import forms, registry, select\nfrom .._torch import on_inductor",
        ),
        ("passes.good", "from ..ops import linear\nfrom ..config import dispatch_config"),
        ("modules.good", "from ..tensors.nvfp4 import NVFP4Tensor\nimport torch\ntorch._check(True)"),
        ("_torch.good", "import torch._inductor.ir"),
    ],
)
def test_what_is_allowed_passes(module, source):
    planted = package_sources()
    clean = violations(planted)
    assert violations({**planted, f"{PACKAGE}.{module}": source}) == clean
