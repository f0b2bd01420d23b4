"""The CPU path: C kernels (AVX-512 and plain C), the ATen fallback, and the cache that compiles them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import platform
import shutil
import stat
import subprocess
import warnings

import pytest
import torch

from fp4_inductor.errors import KernelError
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import build
from fp4_inductor.kernels.linear import cpu, cpu_native
from fp4_inductor.ops import linear as contract

fp4 = torch.ops.fp4
X86 = platform.machine() in ("x86_64", "AMD64")
FLAGS = {"plain C": ("-fopenmp",)}
if X86:
    FLAGS["without AVX-512"] = ("-march=native", "-mno-avx512f", "-fopenmp")
PATHS = ("native", *FLAGS, "ATen")
SOURCE = "cpu/nvfp4.c"


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Each implementation in turn serves fp4.linear and fp4.dequantize."""
    if request.param == "ATen":
        monkeypatch.setattr(build, "compiler", lambda: None)  # a machine without a C compiler
        cpu_native._library.cache_clear()
        assert cpu_native.status()[0] is False
        assert "no C compiler" in cpu_native.status()[1]
    elif request.param != "native":
        library = cpu_native.opened(build.shared_library(SOURCE, FLAGS[request.param]))
        assert library.fp4_isa() != b"avx512"
        monkeypatch.setattr(cpu_native, "_library", lambda: (library, request.param))
    else:
        native, text = cpu_native.status()
        assert native, text
    yield request.param
    monkeypatch.undo()
    cpu_native._library.cache_clear()


def weight(n, k):
    """Every code and the whole range of scales occur."""
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    s = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37)


def error(y, r):
    return ((y.double() - r.double()).norm() / r.double().norm()).item()


SHAPES = ((64, 128), (33, 48), (1, 16), (7, 1040), (130, 272), (5, 32))


@pytest.mark.parametrize("dtype", list(contract.CONTRACT.tolerance), ids=str)
def test_few_rows(path, dtype):
    for m in range(1, 10):  # 8 is the GEMV's last
        for n, k in SHAPES:
            x, w, bias = torch.randn(m, k).to(dtype), weight(n, k), torch.randn(n).to(dtype)
            exact = x.double() @ nvfp4.dequantize(*w, torch.float32).double().T
            # With a handful of outputs roundings do not average: one may be half a unit, and ATen rounds the weight too.
            bound = contract.CONTRACT.tolerance[dtype] * (1 if m * n >= 32 else 2)
            assert error(fp4.linear(x, *w), exact) <= bound, (m, n, k)
            assert error(fp4.linear(x, *w, bias), exact + bias.double()) <= bound, (m, n, k)


@pytest.mark.parametrize("dtype", list(contract.CONTRACT.tolerance), ids=str)
def test_many_rows_block_by_block(path, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "_BLOCK_WEIGHTS", 16 * 272)  # 16 rows of the weight at a time: several blocks, the last one short
    for m, n, k in ((9, 130, 272), (64, 33, 272), (17, 1, 272), (12, 100, 4096), (33, 16, 16)):
        x, w = torch.randn(m, k).to(dtype), weight(n, k)
        # ATen's half GEMM rounds its partial sums and the weight itself is rounded to x.dtype once
        bound = max(contract.CONTRACT.tolerance[dtype], 5e-6)
        assert error(fp4.linear(x, *w), contract.reference(x.double().float(), *w)) <= bound, (m, n, k)


def test_every_byte_with_every_scale(path):
    q = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    s = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous().view(nvfp4.SCALE_DTYPE)
    for g in (1.0, 1.7, 3.1e-39, 1e30):
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
            ours = fp4.dequantize(q, s, torch.tensor(g), dtype)
            want = nvfp4.dequantize(q, s, torch.tensor(g), dtype)
            assert torch.equal(ours.view(bits), want.view(bits)), (g, dtype)


@pytest.mark.parametrize("shape", [(3, 5, 16), (2, 3, 33, 80), (0, 4, 16), (2, 0, 16), (7, 48)])
def test_dequantize_shapes(path, shape):
    w = nvfp4.quantize(torch.randn(shape))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(fp4.dequantize(*w, dtype), nvfp4.dequantize(*w, dtype))


@pytest.mark.parametrize("g", [0.37, 3e-41, 1e-38, 1e35, float("inf")])
@pytest.mark.parametrize("shape", [(64, 512), (343, 48), (512, 1008)])
def test_many_weights_to_bfloat16(path, shape, g):
    """From 16384 weights on, the C kernel looks bfloat16 values up: bit for bit the product, subnormal, infinite and NaN ones included."""
    q, s, _ = weight(*shape)
    s.view(torch.uint8)[0, :2] = torch.tensor([0x7F, 0xFF])
    got, want = fp4.dequantize(q, s, torch.tensor(g), torch.bfloat16), nvfp4.dequantize(q, s, torch.tensor(g), torch.bfloat16)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7.0).view(torch.int16), want.nan_to_num(7.0).view(torch.int16))


def test_scratch_memory_does_not_outlive_its_mode_or_leave_its_thread():
    import threading

    w, x = weight(64, 512), torch.randn(20, 512, dtype=torch.bfloat16)
    with torch.inference_mode():
        want = fp4.linear(x, *w)
    results = []
    threads = [threading.Thread(target=lambda: results.extend(fp4.linear(x, *w) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(y, want) for y in (*results, fp4.linear(x.clone().requires_grad_(), *w)))


def test_rows_stay_apart(path):
    w = weight(33, 80)
    for m in (4, 20):
        x = torch.randn(m, 80)
        clean = fp4.linear(x, *w)
        for bad in (float("nan"), float("inf")):
            x[1, 79] = bad
            x[2] = 0
            y = fp4.linear(x, *w)
            keep = [i for i in range(m) if i not in (1, 2)]
            assert torch.equal(y[keep], clean[keep])
            assert not y[1].isfinite().any()
            assert not y[2].any()


def test_a_strided_activation_and_weight_give_the_same_bits(path):
    q, s, g = weight(64, 96)
    for m in (3, 20):
        x = torch.randn(m, 96)
        y = fp4.linear(x, q, s, g)
        assert torch.equal(fp4.linear(torch.randn(2, m, 200)[:, :, 5:101].copy_(x)[1], q, s, g), y)
        assert torch.equal(fp4.linear(x.t().contiguous().t(), q, s, g), y)
        wide = torch.zeros(128, 48, dtype=torch.uint8)
        wide[::2] = q
        assert torch.equal(fp4.linear(x, wide[::2], s, g), y)


def test_thread_count_changes_no_bit():
    x, w = torch.randn(5, 272), weight(131, 272)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu_native.gemv(x, *w[:2], 0.37))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_gemv_refuses_more_rows_than_it_has():
    w = weight(8, 16)
    with pytest.raises(KernelError, match="9"):
        cpu_native.gemv(torch.randn(9, 16), *w[:2], 1.0)


# --- the build cache ---------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4_INDUCTOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_private(cache):
    old = os.umask(0)
    try:
        build.cache_dir()
    finally:
        os.umask(old)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o720])
def test_a_cache_that_others_can_write_is_refused(cache, mode):
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(KernelError, match=f"{mode:o}"):
        build.shared_library(SOURCE, ("-fopenmp",))
    assert not list(cache.iterdir())


def test_key_holds_flags_source_and_compiler(cache, tmp_path, monkeypatch):
    sources = tmp_path / "csrc"
    (sources / "cpu").mkdir(parents=True)
    shutil.copy(build.csrc_dir() / SOURCE, sources / SOURCE)
    monkeypatch.setattr(build, "csrc_dir", lambda: sources)
    first = build.shared_library(SOURCE, ("-O1",))
    assert first.parent == cache
    stamp = first.stat().st_mtime_ns
    assert build.shared_library(SOURCE, ("-O1",)) == first
    assert first.stat().st_mtime_ns == stamp  # found, not rebuilt
    flags = build.shared_library(SOURCE, ("-O1", "-DX"))
    with open(sources / SOURCE, "a") as f:
        f.write("\n")
    source = build.shared_library(SOURCE, ("-O1",))
    monkeypatch.setattr(build, "_processor", lambda: "flags : another processor")
    processor = build.shared_library(SOURCE, ("-O1",))
    assert len({first, flags, source, processor}) == 4


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(cache, tmp_path, monkeypatch):
    (tmp_path / "bad.c").write_text("int f( { return 1; }\n")
    monkeypatch.setattr(build, "csrc_dir", lambda: tmp_path)
    with pytest.raises(KernelError, match=r"bad\.c"):
        build.shared_library("bad.c", ())
    assert not list(cache.iterdir())


def test_no_compiler_is_an_error_with_a_remedy(cache, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(KernelError, match="set CC"):
        build.shared_library(SOURCE, ())


def _build_and_load(barrier, results):
    barrier.wait(60)
    found = build.shared_library(SOURCE, ("-O1",))
    loaded = subprocess.run(["nm", "-D", str(found)], capture_output=True, text=True, check=False).stdout if shutil.which("nm") else None
    results.put((str(found), ctypes.CDLL(str(found)).fp4_gemv is not None and (loaded is None or "fp4_gemv" in loaded)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_four_processes_build_at_once(cache):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_build_and_load, args=(barrier, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=100) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert len({name for name, _ in got}) == 1
    assert all(loads for _, loads in got)
    assert sorted(str(f) for f in cache.iterdir()) == [got[0][0], f"{got[0][0]}.sha256"]  # no partial file is left


@pytest.mark.parametrize("damage", ["truncated", "a flipped byte", "no record", "a damaged record"])
def test_a_damaged_library_is_built_again_before_it_is_loaded(cache, damage):
    """Loading half a library would end the process with SIGBUS; one line says that it is built again, and the next process finds it whole."""
    library = build.shared_library(SOURCE, ("-O1",))
    whole, record = library.read_bytes(), library.with_name(f"{library.name}.sha256")
    if damage == "truncated":
        os.truncate(library, len(whole) // 2)
    elif damage == "a flipped byte":
        middle = len(whole) // 2
        library.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    elif damage == "no record":
        record.unlink()
    else:
        record.write_bytes(b"\xff\xfe")
    with pytest.warns(RuntimeWarning, match="it is built again") as said:
        assert build.shared_library(SOURCE, ("-O1",)) == library
    assert len(said) == 1 and "\n" not in str(said[0].message)
    assert library.read_bytes() == whole
    assert ctypes.CDLL(str(library)).fp4_gemv is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build.shared_library(SOURCE, ("-O1",))
