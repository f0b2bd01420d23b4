"""Compiled artifacts are keyed by every byte of the package and by the dispatch config; the user's own tag is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp4_inductor
from fp4_inductor import _exchange, cache_salt, config
from fp4_inductor.passes import identity

ROOT = Path(fp4_inductor.__file__).resolve().parent.parent

SCRIPT = """
import json, sys
import torch, fp4_inductor
from fp4_inductor import config
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name, part in zip("qsg", torch.ops.fp4.quantize(torch.randn(32, 64))):
            self.register_buffer(name, part)
    def forward(self, x):
        return torch.nn.functional.linear(x, torch.ops.fp4.dequantize(self.q, self.s, self.g, x.dtype))  # no pointwise kernel: no C++ compiler

for dispatch in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), config.dispatch(**dispatch):
        torch.compile(Model())(torch.ones(3, 64))
    i, a = counters["inductor"], counters["aot_autograd"]
    print(json.dumps({"fx": [i["fxgraph_cache_hit"], i["fxgraph_cache_miss"]], "aot": [a["autograd_cache_hit"], a["autograd_cache_miss"]],
                      "bypass": i["fxgraph_cache_bypass"] + a["autograd_cache_bypass"], "file": fp4_inductor.__file__}))
"""

HIT = {"fx": [1, 0], "aot": [1, 0]}
MISS = {"fx": [0, 1], "aot": [0, 1]}


@pytest.fixture
def package(tmp_path):
    """A copy of the package that a test may change."""
    for name in ("fp4_inductor", "csrc"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=shutil.ignore_patterns("*.so", "build"))
    return tmp_path / "copy"


def compile_with(package: Path, cache: Path, *dispatch: dict) -> list[dict]:
    """What the caches answered in one process, for each of the dispatch configs in turn."""
    env = {**os.environ, "PYTHONPATH": str(package), "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(dispatch)], env=env, cwd=package, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()[-len(dispatch) :]]
    for out in found:
        assert Path(out.pop("file")).is_relative_to(package)
        assert out.pop("bypass") == 0
        if out["aot"] == [1, 0] and out["fx"] == [0, 0]:
            out["fx"] = [1, 0]  # an AOTAutograd hit that carries its FX graph does not look it up
    return found


def test_hit_and_miss_across_processes(package, tmp_path):
    cache = tmp_path / "cache"
    assert compile_with(package, cache, {}) == [MISS]
    assert compile_with(package, cache, {}, {"unproven": "runtime"}) == [HIT, MISS]
    changed = package / "fp4_inductor" / "formats" / "e2m1.py"
    changed.write_bytes(changed.read_bytes() + b"#\n")
    assert compile_with(package, cache, {}) == [MISS]


def tag() -> str:
    import torch.compiler.config as compiler_config

    return compiler_config.cache_key_tag


@pytest.fixture
def restored_tag():
    import torch._inductor.compile_fx  # noqa: F401  (registers the passes)
    import torch.compiler.config as compiler_config

    old = compiler_config.cache_key_tag
    yield compiler_config
    compiler_config.cache_key_tag = old


def test_the_users_tag_is_kept(restored_tag):
    restored_tag.cache_key_tag = "mine;theirs"
    identity.refresh()
    identity.refresh()
    assert tag() == f"mine;theirs;{identity.salt()}"


def test_a_threshold_changes_the_tag_and_back(restored_tag):
    identity.refresh()
    before = tag()
    with config.dispatch(unproven="runtime"):
        inside = tag()
        with config.dispatch(thresholds=(("gemv", 1),)):
            assert tag() not in (before, inside)
        assert tag() == inside
    assert inside != before
    assert tag() == before


@pytest.mark.parametrize("forget", [False, True], ids=["", "after reset"])
def test_a_tag_assigned_later_is_salted_when_something_is_compiled(restored_tag, forget):
    from fp4_inductor._torch import cache

    torch._dynamo.reset()
    if not forget:
        cache.on_compile_start(identity.refresh)
    restored_tag.cache_key_tag = "mine"
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: x + 1, backend="inductor" if forget else "eager")(torch.ones(2))
    assert tag() == f"mine;{identity.salt()}"


def test_sources_are_all_files_that_decide_something():
    names = {p.relative_to(ROOT).as_posix() for p in identity.sources()}
    assert {"fp4_inductor/config.py", "fp4_inductor/passes/identity.py", "fp4_inductor/_torch/fx.py"} <= names
    on_disk = {p.relative_to(ROOT).as_posix() for p in (ROOT / "fp4_inductor").rglob("*.py")}
    assert on_disk <= names
    assert not [n for n in names if "__pycache__" in n or n.endswith(".md")]


def test_nothing_is_hashed_at_import():
    code = "import fp4_inductor, sys; assert 'fp4_inductor.passes' not in sys.modules and 'torch._inductor.compile_fx' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)


def test_groups_of_ranks_are_in_the_key(monkeypatch):
    """A graph that sums over ranks in its launches is none for a process whose ranks share no memory."""
    monkeypatch.setattr(_exchange, "_GROUPS", {})
    keys = [(identity.key(), cache_salt())]
    for group in ("a group", "another group"):
        _exchange.add(group, _exchange.Exchange((0, 0), 1, None))
        keys.append((identity.key(), cache_salt()))
    assert [len(set(column)) for column in zip(*keys, strict=True)] == [3, 3], "the keys of torch's caches, and what is given to those above them"
    with fp4_inductor.compile_range(1, 16384):
        assert len(cache_salt()) <= 120
