"""The CUDA sources compile for every architecture: no spills, the intended MMA, wide loads. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from fp4_inductor import errors
from fp4_inductor.kernels import build, select
from fp4_inductor.kernels.linear import configs, cuda_small
from lowering_tests.kernels import aot

needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed: the CUDA sources are compiled where it is")


# per source: instructions that must be there, and how many kernels: dtypes x (tiles of 8, 16 and 32 tokens; of any K)
SOURCES = {
    "gemm/linear_small.cu": (("HMMA.16816.F32.BF16", r"HMMA\.16816\.F32\s", r"LDGSTS\.E\.BYPASS\S*128"), lambda arch: 2 * (3 + 2 + (4 if arch == 90 else 0) + (3 if arch == 90 else 2))),
    "gemm/linear_mid.cu": (("HMMA.16816.F32.BF16", r"HMMA\.16816\.F32\s", r"LDGSTS\.E\.BYPASS\S*128"), lambda arch: 2 * (3 + 1)),
}
ARCHS = [80, 90, 100, 120, pytest.param(121, marks=pytest.mark.skipif(aot.VERSION < (3, 7), reason="the disassembler of Triton 3.6 does not know sm_121"))]


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_without_spills(source, arch):
    wanted, count = SOURCES[source]
    library = build.cuda_library(source, arch)
    usage = subprocess.run([aot.tool("cuobjdump"), "--dump-resource-usage", str(library)], capture_output=True, text=True, check=True).stdout
    kernels = re.findall(rf"Function (\S*{Path(source).stem}\S*):\s+REG:(\d+) STACK:(\d+)", usage)
    assert len(kernels) == count(arch)
    assert {int(stack) for _, _, stack in kernels} == {0}
    sass = subprocess.run([aot.tool("cuobjdump"), "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(STL|LDL)\b", sass)
    assert not re.search(r"\b(RED|ATOM)G?\b", sass), "sums in no fixed order"
    for instruction in wanted:
        assert re.search(instruction, sass), instruction


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


def test_without_nvcc_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(build, "nvcc", lambda: None)
    cuda_small._library.cache_clear()
    try:
        assert "nvcc not found" in select.csrc_status(90)
        assert select.csrc_status(0) == ""
    finally:
        cuda_small._library.cache_clear()


def test_every_tile_is_one_that_is_compiled():
    source = (build.csrc_dir() / "gemm" / "linear_small.cu").read_text()
    compiled = {tuple(map(int, found)) for found in re.findall(r"TILE\((\d+), (\d+), (\d+)\)", source)}
    for n in (16, 1024, 4096, 8192, 8448, 14336, 28672, 151936):
        for k in (64, 4096, 14336):
            for m in range(1, cuda_small.MAX_M + 1):
                for arch, shared in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99), (121, 99)):
                    c = configs.small(m, n, k, arch)
                    assert (c.rows_16, c.warps, c.stages) in compiled
                    ring = c.warps * c.stages * 16 * c.rows_16 * 72
                    sums = c.warps * max(8, -(-m // 8) * 8) * (16 * c.rows_16 + 1) * 4
                    assert max(ring, sums) <= shared * 1024
