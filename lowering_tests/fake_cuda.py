"""Inductor's CUDA code generation on a machine, and a torch build, without CUDA.

Tensors are FakeTensors on device "cuda"; everything up to the generated Python and Triton source is the real thing.
"""

from __future__ import annotations

import contextlib
import re
import types
import warnings
from collections.abc import Iterator
from unittest import mock

import torch
import torch._dynamo as dynamo
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def _properties(cc: tuple[int, int], sms: int):
    return types.SimpleNamespace(
        name="fake GPU", major=cc[0], minor=cc[1], total_memory=141 << 30, multi_processor_count=sms, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, gcnArchName="",
        clock_rate=1980000, memory_clock_rate=3201000, memory_bus_width=6144,
    )  # fmt: skip


class _FakeDriver:
    def __init__(self, cc):
        self.cc = cc

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.cc[0] * 10 + self.cc[1], 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_device_capability(self, device=None):
        return self.cc

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_device_interface(self):
        return torch.cuda


def _without_memory(make):
    def fake(*args):
        with FakeTensorMode():
            return make(*args)

    return fake


NOT_COMPILED = "fake CUDA: nothing is compiled"


@contextlib.contextmanager
def pretend_cuda(cc: tuple[int, int] = (9, 0), sms: int = 132, csrc: str = NOT_COMPILED) -> Iterator[None]:
    """Torch, Inductor and Triton see one GPU of compute capability ``cc``; nothing can run on it.

    ``csrc``: what ``select.csrc_status`` answers: empty for "the CUDA sources are compiled".
    """
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton as triton_utils
    from triton.runtime import driver

    from fp4_inductor._torch import kept
    from fp4_inductor.kernels import csrc as libraries
    from fp4_inductor.kernels import select

    properties = _properties(cc, sms)
    interface = device_interface.CudaInterface
    real_init = joint_graph.lazy_init
    caches = [f for f in vars(triton_utils).values() if hasattr(f, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_properties", lambda d=None: properties),
            (torch.cuda, "get_device_capability", lambda d=None: cc),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (interface, "get_device_properties", staticmethod(lambda d=None: properties)),
            (interface, "current_device", staticmethod(lambda: 0)),
            (interface, "device_count", staticmethod(lambda: 1)),
            (interface, "is_available", staticmethod(lambda: True)),
            (interface.Worker, "get_device_properties", staticmethod(lambda d=None: properties)),
            (interface.Worker, "current_device", staticmethod(lambda: 0)),
            (interface, "synchronize", staticmethod(lambda d=None: None)),
            (interface, "is_bf16_supported", staticmethod(lambda including_emulation=False: True)),
            (driver, "_active", _FakeDriver(cc)),
            (select, "csrc_status", lambda call: csrc),
            (select, "csrc_door", lambda name, arch: NOT_COMPILED),
            (libraries, "start", lambda names, arch: None),  # minutes of nvcc in the background, for libraries that nothing here loads
            (kept, "_allocated", _without_memory(kept._allocated)),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (joint_graph, "lazy_init", lambda *a, **k: real_init(torch.device("cpu"))),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        for cached in (DeviceProperties.create, *caches):
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in (DeviceProperties.create, *caches):
                cached.cache_clear()


class _Generated(BaseException):
    """Raised instead of running what was generated; ``args[0]``: what it was called with."""


@contextlib.contextmanager
def code_generation(cc: tuple[int, int] = (9, 0), config: dict | None = None, csrc: str = NOT_COMPILED) -> Iterator[list[str]]:
    """Inside, ``torch.compile`` on fake CUDA tensors appends Inductor's output code to the list; ``call`` runs nothing.

    Args:
        config: patches of ``torch._inductor.config``.
        csrc: see :func:`pretend_cuda`.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.graph import GraphLowering

    out: list[str] = []

    def compile_to_module(self):
        wrapper, kernels = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        out.append(wrapper.value)
        if kernels:
            out.append(kernels.value)

        class Module:
            __file__ = __file__

            def call(self, args):
                raise _Generated(list(args))

        return Module()

    dynamo.reset()
    options = {"force_disable_caches": True, **(config or {})}
    try:
        with (
            pretend_cuda(cc, csrc=csrc),
            FakeTensorMode(shape_env=ShapeEnv()),
            torch.no_grad(),
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
            inductor_config.patch(options),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message=".*force_disable_caches.*")
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield out
    finally:
        dynamo.reset()


def call(compiled, *inputs) -> list:
    """Call a compiled function inside :func:`code_generation`; returns the (fake) arguments that the generated ``call`` would get."""
    try:
        compiled(*inputs)
    except _Generated as generated:
        return generated.args[0]
    return []


def generated_code(build, shapes, *, cc=(9, 0), mark=None, config=None, csrc=NOT_COMPILED, **compile_options) -> list[str]:
    """Inductor's output code for ``torch.compile(build())`` on fake CUDA tensors.

    Args:
        build: called under the fake mode; returns a module or function whose tensors are created with device="cuda".
        shapes: ``(shape, dtype)`` of each input.
        mark: called with the inputs before compilation (``mark_dynamic`` and the like).
        config: patches of ``torch._inductor.config``.
        csrc: see :func:`pretend_cuda`.
    """
    with code_generation(cc, config, csrc) as out:
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]
        if mark is not None:
            mark(*inputs)
        call(torch.compile(build(), fullgraph=True, **compile_options), *inputs)
    return out


_NOISE = re.compile(r"\s*(#|assert_|del |args\.clear|s\d+ = |arg.* = args|with torch.cuda|torch.cuda.set|\w*stream0 = |arg\d+_1 = copy_if)")


# How a graph says which M it serves (fp4_inductor/_torch/holding.py).
_HELD = re.compile(r"^ *if (.*):\n +import fp4_inductor\.errors\n +raise fp4_inductor\.errors\.RowsError\.outside\((.*)\)\n *(buf\d+) = None\n", re.M)


def held(code: str) -> list[tuple[str, str]]:
    """``(condition, arguments of the error)`` of each check of M in the wrapper; symbols renamed by first use."""
    seen: dict[str, str] = {}
    found = [f"{m[1]}\0{m[2]}" for m in _HELD.finditer(code)]
    return [tuple(re.sub(r"\bs\d+\b", lambda m: seen.setdefault(m[0], f"s{len(seen)}"), text).split("\0")) for text in found]


def call_body(code: str) -> str:
    """The wrapper's ``call`` without what differs between torch releases, and without checks of M (:func:`held`); symbols renamed by first use."""
    body = _HELD.sub("", code[code.index("    def call(self, args):") :].split("\nrunner = ")[0])
    kept = []
    for line in body.splitlines()[1:]:
        line = line.split("  #")[0].rstrip()
        if line.strip() and not _NOISE.match(line):
            kept.append(re.sub(r"raw_stream0", "stream0", line.removeprefix(" " * 8)))
    text = _without_aliases("\n".join(kept))
    for pattern, name in ((r"\bs\d+\b", "s"), (r"\bbuf\d+\b", "b"), (r"\barg\d+_1\b", "in")):
        seen: dict[str, str] = {}
        text = re.sub(pattern, lambda m, n=name, s=seen: s.setdefault(m.group(0), f"{n}{len(s)}"), text)
    return _rows_before_their_scales(text)


def _rows_before_their_scales(text: str) -> str:
    """The FP8 rounding of torch 2.15, which allocates the scales first, and may reduce in place, in the words of 2.11 to 2.13."""
    scales, rows = r"    b0 = empty_strided_cuda\(\(s0, 1\), \(1, (?:s0|1)\), torch\.float32\)\n", r"    b1 = (empty_strided_cuda\(.*torch\.float8_e4m3fn\))\n"
    if not re.search(scales + rows, text):
        return text
    text = re.sub(scales + rows, r"    b1 = \1\n    b0 = empty_strided_cuda((s0, 1), (1, 1), torch.float32)\n", text)
    text = re.sub(r"\.run\((?:b0, ((?:in\d+, )+)|((?:in\d+, )+)b0, )b1, ", lambda m: f".run({m[1] or m[2]}b1, b0, ", text)
    return re.sub(r"\bb([01])\b", lambda m: f"b{1 - int(m.group(1))}", text)


def _without_aliases(text: str) -> str:
    """``buf1 = buf0`` (written by torch 2.11 to 2.13 behind a fallback, not by 2.15, and for reuse in place) resolved."""
    lines: list[str] = []
    renamed: dict[str, str] = {}
    for line in text.splitlines():
        alias = re.fullmatch(r"\s*(buf\d+) = (buf\d+)(?:; del buf\d+)?", line)
        if alias:
            renamed[alias[1]] = renamed.get(alias[2], alias[2])
        else:
            lines.append(re.sub(r"\bbuf\d+\b", lambda m: renamed.get(m.group(0), m.group(0)), line))
    return "\n".join(lines)


def triton_sources(code: str) -> dict[str, str]:
    """``{kernel name: source}`` of the Triton kernels in generated code."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", code, re.S))


def triton_ptx(code: str, cc: tuple[int, int] = (9, 0)) -> dict[str, str]:
    """``{kernel name: PTX}`` of the Triton templates in generated code, compiled for ``cc``."""
    import triton
    from torch._inductor.codecache import PyCodeCache

    out: dict[str, str] = {}
    compile_ = triton.compile

    def record(*args, **kwargs):
        done = compile_(*args, **kwargs)
        out[done.metadata.name] = done.asm["ptx"]
        return done

    with pretend_cuda(cc), mock.patch.object(triton, "compile", record):
        for name, source in triton_sources(code).items():
            if name.startswith("triton_tem"):
                kernel = getattr(PyCodeCache.load(source), name)
                for config in kernel.configs:
                    kernel._precompile_config(config)
    return out
