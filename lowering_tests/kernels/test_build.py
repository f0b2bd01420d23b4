"""How CUDA libraries get made: at first use, in the background, or in a wheel; and what is said where they cannot be."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from fp4_inductor import errors
from fp4_inductor.kernels import background, build, compilers, csrc, make_wheel, prebuilt, select

needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed: the CUDA sources are compiled by it")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No library is known yet, the cache is empty."""
    monkeypatch.setenv("FP4_INDUCTOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(csrc, "_libraries", background.Background())
    for cached in (csrc._library, csrc.binding, csrc._tell):
        cached.cache_clear()
    yield tmp_path
    for cached in (csrc._library, csrc.binding, csrc._tell):
        cached.cache_clear()


@pytest.fixture
def fake_compiler(monkeypatch, fresh):
    """nvcc and c++ are a script that writes its arguments to the file behind -o, half a second later."""
    script = fresh / "compiler"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nsleep 0.5\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && echo "$*" > "$2"; shift; done\n')
    script.chmod(0o700)
    for name in ("nvcc", "cxx"):
        monkeypatch.setattr(build, name, lambda: str(script))
    monkeypatch.setattr(build, "library_folders", lambda: ())
    monkeypatch.setattr(make_wheel, "_shared_runtime", lambda: ())
    return script


@needs_nvcc
def test_the_compilers_own_message_is_shown(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "broken.cu").write_text("this is not CUDA")
    monkeypatch.setattr(build, "csrc_dir", lambda: tmp_path)
    with pytest.raises(errors.KernelError, match="broken.cu"):
        build.cuda_library("broken.cu", 90)


@needs_nvcc
def test_a_changed_header_is_a_new_library(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "one.cu").write_text('#include "common/a.cuh"\nextern "C" int value() { return VALUE; }\n')
    monkeypatch.setattr(build, "csrc_dir", lambda: tmp_path)
    paths = []
    for value in (1, 2, 1):
        (tmp_path / "common" / "a.cuh").write_text(f"#define VALUE {value}\n")
        paths.append(build.cuda_library("one.cu", 90))
    assert paths[0] == paths[2] != paths[1]


def test_a_plan_asks_for_the_libraries_that_serve_it(monkeypatch):
    """A library that failed to build must be known before a row that needs it is chosen; candidates and kernels of other shapes are not built unasked."""
    asked, begun = [], []
    monkeypatch.setattr(csrc, "why_not", lambda name, arch: asked.append(name) or f"{name} is broken")
    monkeypatch.setattr(csrc, "start", lambda names, arch: begun.append(sorted(names)))
    for op, arch, n, k, names in (
        ("linear", 90, 64, 64, ["linear_gemv", "linear_small", "linear_wide"]),
        ("linear", 90, 4096, 4096, ["linear_gemv", "linear_table", "linear_wide", "linear_wide_fp8"]),
        ("linear", 90, 4096, 2880, ["linear_gemv", "linear_small", "linear_wide"]),
        ("linear_glu", 90, 64, 64, ["linear_gemv_glu", "linear_small_glu", "linear_wide_glu"]),
        ("linear_epilogue", 90, 64, 64, ["linear_gemv_pointwise", "linear_small_pointwise", "linear_wide_pointwise"]),
        ("sparse_linear", 90, 64, 64, ["sparse_linear_small"]),
        ("linear_glu", 80, 64, 64, ["linear_small"]),
        ("linear_w4a4", 120, 64, 64, ["linear_small"]),
        ("moe", 90, 64, 64, ["moe_grouped_wide", "moe_grouped_wide_fp8"]),
        ("moe", 90, 4096, 4096, ["moe_decode_table", "moe_grouped_wide", "moe_grouped_wide_fp8"]),
    ):
        begun.clear()
        assert select.describe(op, arch, torch.bfloat16, n, k).csrc == f"{names[0]} is broken"
        assert begun == [names], (op, n, k)
        select.describe(op, arch, torch.bfloat16, n, k, eager=True)
        assert begun[1:] == [[name for name in names if "gemv" not in name]], "it serves no eager call"
    assert {select.describe(op, arch, torch.bfloat16, 64, 64).csrc for op, arch in (("moe", 80), ("sparse_moe", 80), ("moe", 0))} == {""}


def test_without_nvcc_the_reason_is_told(fresh, monkeypatch, capfd):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    call = select.describe("linear", 90, torch.bfloat16, 4096, 4096)
    assert "nvcc not found" in call.csrc and 'pip install "fp4_inductor[nvcc]"' in call.csrc
    assert select.describe("linear", 0, torch.bfloat16, 4096, 4096).csrc == ""
    assert "ctypes" in csrc.door("linear_small", 90) and "nvcc not found" in csrc.door("linear_small", 90)
    with pytest.raises(errors.KernelError, match="nvcc not found"):
        csrc._through_ctypes("linear_small", (torch.empty(1, 64),), (torch.empty(8, 32),), torch.empty(()), None, 90, (0, 0, 0))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1 and "Triton kernels" in said[0] and "sm_90" in said[0] and "compiling" not in said[0]


def test_a_wheel_for_other_architectures_says_so_in_one_line(fresh, monkeypatch, capfd):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setattr(prebuilt, "manifest", lambda: {f"linear_small.sm_{arch}.so": {"identity": "another"} for arch in (90, 80)} | {"binding.so": {}})
    monkeypatch.setattr(prebuilt, "find", lambda identity: None)
    call = select.describe("linear", 87, torch.bfloat16, 4096, 4096)
    assert "no CUDA kernels for sm_87" in call.csrc and "this installation has kernels for sm_80, sm_90" in call.csrc
    assert select.plan(call, select.DispatchConfig()).pick(8).kernel.startswith("triton")
    [line] = capfd.readouterr().err.splitlines()
    assert "Triton kernels" in line and "sm_87" in line


def test_libraries_are_compiled_together_and_once(fresh, fake_compiler, monkeypatch, capfd):
    """Four libraries are compiled at the same time, start() waits for none of them, and asking again compiles nothing."""
    monkeypatch.setattr(background, "_free_core", threading.Semaphore(8))
    names = [name for name in csrc.kernels_for(90)][:4]
    runs, done = [], []
    started, together = threading.Event(), threading.Barrier(len(names))
    compile_to = build.compile_to

    def compiled(target, compiler, source, arguments):
        assert started.wait(60), "start() waits for the compilers"
        runs.append(target)
        if source != build.BINDING:
            together.wait(60)  # raises BrokenBarrierError unless all four are here
        compile_to(target, compiler, source, arguments)
        done.append(target)

    monkeypatch.setattr(build, "compile_to", compiled)
    begin = time.monotonic()
    csrc.start(names, 90)
    assert not done
    started.set()
    paths = [csrc._libraries.result((name, 90)) for name in names]
    assert len(set(paths)) == 4 and all(path.exists() for path in paths)
    csrc._libraries.result(csrc._BINDING)
    assert len(runs) == 5
    csrc.start(names, 90)
    assert [csrc._libraries.result((name, 90)) for name in names] == paths and len(runs) == 5
    said = ""
    while "compiled 4" not in said:  # a thread says so once the last one is done
        assert time.monotonic() - begin < 20, said
        said += capfd.readouterr().err
        time.sleep(0.01)
    lines = said.splitlines()
    assert re.fullmatch(r"fp4_inductor: compiling 4 CUDA kernels for sm_90a, once for this machine, about \d+ s", lines[0])
    assert any(re.fullmatch(r"fp4_inductor: compiled 4 CUDA kernels for sm_90a in \d+ s", line) for line in lines)
    monkeypatch.setattr(csrc, "_libraries", background.Background())
    csrc.start(names, 90)  # another process: the cache has them
    assert [csrc._libraries.result((name, 90)) for name in names] == paths and len(runs) == 5


def test_two_processes_compile_a_library_once(fresh, fake_compiler):
    """Two ranks of a model need the same libraries at the same time: one compiles, the other waits and takes what is there. One that dies leaves the lock."""
    runs, script = fresh / "runs", fake_compiler.read_text()
    fake_compiler.write_text(script.replace("sleep 0.5", f'echo "$*" >> {runs}; exec sleep 20'))

    def rank() -> int:
        child = os.fork()
        if child == 0:
            try:
                build.cuda_library("gemm/linear_small.cu", 90)
            finally:
                os._exit(0)
        return child

    dying = rank()
    while not runs.exists():
        time.sleep(0.01)
    fake_compiler.write_text(script.replace("sleep 0.5", f'echo "$*" >> {runs}; sleep 1'))
    waiting = [rank(), rank()]
    time.sleep(0.3)
    assert len(runs.read_text().splitlines()) == 1, "both wait"
    os.kill(dying, signal.SIGKILL)
    for child in (dying, *waiting):
        os.waitpid(child, 0)
    assert len(runs.read_text().splitlines()) == 2, "the one that died, and one more"
    assert build.cuda_library("gemm/linear_small.cu", 90).exists() and len(runs.read_text().splitlines()) == 2


def test_a_child_process_does_not_wait_for_its_own_copy_of_a_lock(fresh):
    """Of a parent that was killed while it compiled: a lock lives as long as a process that inherited its file."""
    target = build.cache_dir() / "one.so"
    with build._alone(target):
        child = os.fork()
        if child == 0:
            os._exit(0 if not build._locked else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and build._locked
    with build._alone(target):
        assert len(build._locked) == 1


def test_a_plan_that_may_be_wrong_waits_for_no_compiler(fresh, fake_compiler, monkeypatch):
    monkeypatch.setattr(select, "arch_of", lambda device: 90)
    go, compile_to = threading.Event(), build.compile_to

    def compiled(*args):
        assert go.wait(60), "expect() waits for the compilers"
        compile_to(*args)

    monkeypatch.setattr(build, "compile_to", compiled)
    call = select.expect("linear", torch.device("cuda"), torch.bfloat16, 4096, 4096)
    assert call.csrc == "" and not csrc._libraries.error(("linear_table", 90))
    waiting = threading.Thread(target=lambda: select.describe("linear", torch.device("cuda"), torch.bfloat16, 4096, 4096))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), "a plan that has to be right waits"
    fake_compiler.write_text("#!/bin/sh\necho 'no such architecture' >&2\nexit 3\n")
    go.set()
    waiting.join(60)
    [future.exception(60) for future in csrc._libraries._made.values()]
    assert "no such architecture" in select.expect("linear", torch.device("cuda"), torch.bfloat16, 4096, 4096).csrc


def test_what_the_compiler_says_reaches_whoever_waits(fresh, fake_compiler):
    fake_compiler.write_text("#!/bin/sh\necho 'no such architecture' >&2\nexit 3\n")
    csrc.start(["linear_small"], 90)
    assert "exit status 3: no such architecture" in csrc.why_not("linear_small", 90)
    with pytest.raises(errors.KernelError, match="no such architecture"):
        csrc._libraries.result(csrc._BINDING)  # compiled beside it
    assert not list((fresh / "cache").glob("*.so"))


def test_a_child_process_compiles_what_its_parent_had_not_finished(fresh, fake_compiler):
    csrc.start(["linear_small"], 90)
    child = os.fork()
    if child == 0:
        try:
            csrc.start(["linear_small"], 90)
            os._exit(0 if csrc._libraries.result(("linear_small", 90)).exists() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert csrc._libraries.result(("linear_small", 90)).exists()


def test_a_child_that_lives_on_does_not_hold_the_compilation_up(fresh, fake_compiler, monkeypatch):
    """Forked while a compiler was being started, it had the end of the pipe that the parent reads until it is closed."""
    starts, more, execute = threading.Event(), os.pipe(), subprocess.Popen._execute_child

    def slowly(self, *args, **kwargs):
        starts.set()  # the pipe is there
        time.sleep(0.5)
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", slowly)
    csrc.start(["linear_small"], 90)
    assert starts.wait(30)
    child = os.fork()
    if child == 0:
        os.close(more[1])
        os.read(more[0], 1)  # until the parent closes its end
        os._exit(0)
    try:
        assert csrc._libraries._made["linear_small", 90].result(30).exists()
    finally:
        os.close(more[0]), os.close(more[1])
        os.waitpid(child, 0)


def test_a_program_that_ends_leaves_no_compiler_and_no_file(fresh):
    script = fresh / "compiler"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] || exec sleep 300\n')
    script.chmod(0o700)
    code = (
        "import time; from fp4_inductor.kernels import build, csrc; build.library_folders = lambda: ();"
        "csrc.start(['linear_small', 'linear_table'], 90); time.sleep(0.5); print(*(p.pid for p in build._running))"
    )
    env = {**os.environ, "CUDACXX": str(script), "CXX": str(script), "FP4_INDUCTOR_CACHE": str(fresh / "cache")}
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120, check=True)
    assert time.monotonic() - begin < 60
    pids = done.stdout.split()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() - begin < 60:
        time.sleep(0.05)  # until somebody has asked how they ended
    assert pids and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not list((fresh / "cache").glob("*.so"))


def test_a_wheel_needs_no_compiler(fresh, fake_compiler, monkeypatch):
    """A library of the wheel is known by the hash of its sources and flags; a changed byte of either, or of itself, misses."""
    tree, lib = fresh / "csrc", fresh / "_lib"
    shutil.copytree(build.csrc_dir(), tree)
    monkeypatch.setattr(build, "csrc_dir", lambda: tree)
    fake_compiler.write_text(fake_compiler.read_text().replace("sleep 0.5\n", ""))  # 46 libraries
    names = make_wheel.make(lib, (90, 120))
    libraries = [library for arch in (90, 120) for library in csrc.libraries_for(arch).values()]
    assert len(names) == len(set(libraries)) + 1 == len(libraries) + 1
    monkeypatch.setattr(prebuilt, "prebuilt_dir", lambda: lib)
    prebuilt._read.cache_clear()
    monkeypatch.setattr(build, "nvcc", lambda: None)
    monkeypatch.setattr(build, "cxx", lambda: None)
    found = [build.cuda_library(*library) for library in libraries] + [build.binding_library()]
    assert sorted(path.name for path in found) == names and prebuilt.architectures() == [90, 120]
    kernel = lambda: build.cuda_library(*libraries[0])  # noqa: E731
    binding, shared = build.binding_library, tree / "common" / "call.h"
    for changed, call in ((tree / "common" / "nvfp4.cuh", kernel), (tree / "binding" / "checks.h", binding), (shared, kernel), (shared, binding)):
        before = changed.read_text()
        changed.write_text(before + "\n")
        with pytest.raises(errors.KernelError, match="compiler|no CUDA kernels"):
            call()
        changed.write_text(before)
    with pytest.raises(errors.KernelError, match="no CUDA kernels for sm_80"):
        build.cuda_library(libraries[0][0], 80)
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink):
        damage(found[0])
        with pytest.warns(RuntimeWarning, match="Reinstall"), pytest.raises(errors.KernelError, match="nvcc not found"):
            build.cuda_library(*libraries[0])
    monkeypatch.setattr(build, "nvcc", lambda: str(fake_compiler))
    with pytest.warns(RuntimeWarning, match="Reinstall"):
        assert build.cuda_library(*libraries[0]).parent == fresh / "cache", "a damaged library of the wheel is compiled again where that is possible"
    (lib / prebuilt.MANIFEST).write_text("{")
    prebuilt._read.cache_clear()
    with pytest.warns(RuntimeWarning, match="manifest cannot be read"):
        assert prebuilt.manifest() == {}
    prebuilt._read.cache_clear()


@needs_nvcc
def test_a_library_of_the_wheel_runs_on_old_systems(fresh):
    """Compiled for real, one kernel for one architecture: it takes torch's CUDA runtime and no symbol of a glibc newer than 2.17."""
    target = fresh / "linear_gemv.sm_90.so"
    build.compile_cuda(target, *csrc.libraries_for(90)["linear_gemv"], make_wheel._shared_runtime())
    build.compile_binding(fresh / "binding.so")
    for library in (target, fresh / "binding.so"):
        symbols = subprocess.run(["objdump", "-T", library], capture_output=True, text=True, check=True).stdout
        assert max(tuple(map(int, v.split("."))) for v in re.findall(r"\(GLIBC_([\d.]+)\)", symbols)) <= (2, 17)
        needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        assert ("libcudart.so.13" in needed) == (library == target) and "libtorch_cuda" not in needed
    assert target.stat().st_size < 400_000


def test_nvcc_of_pip_is_found(fresh, monkeypatch):
    """The layout of nvidia-cuda-nvcc 13; without one of the packages that it needs it is no compiler."""
    home = fresh / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "include/crt/host_config.h", "nvvm/bin/cicc"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("#!/bin/sh\n")
        (home / name).chmod(0o700)
    monkeypatch.syspath_prepend(str(fresh))
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    compilers.nvcc.cache_clear()
    try:
        assert compilers.nvcc() == str(home / "bin" / "nvcc")
        (home / "nvvm" / "bin" / "cicc").unlink()
        compilers.nvcc.cache_clear()
        assert compilers.nvcc() is None
    finally:
        compilers.nvcc.cache_clear()


def test_the_extra_installs_what_nvcc_needs():
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in extras["nvcc"]} >= {
        "nvidia-cuda-nvcc",
        "nvidia-nvvm",
        "nvidia-cuda-crt",
        "nvidia-cuda-runtime",
    }
