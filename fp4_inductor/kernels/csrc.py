"""The CUDA kernels of ``csrc/`` at run time: ``torch.ops.fp4_csrc``, internal operators that ``fp4.linear`` and its lowering call.

They are defined here. The first call on a GPU imports this module, and so does Inductor's first import, so that a cached graph finds them in
a new process. At the first call on a GPU the binding is loaded (C++, torch's stable ABI; it implements them for CUDA from then on, without
Python); where it cannot be built, calls go through ctypes. Kernel libraries know no torch, the binding knows no CUDA; both are compiled by
``pip install`` where nvcc and a CUDA torch exist, else now.
"""

from __future__ import annotations

import ctypes
import functools
from collections import namedtuple
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .. import _exchange, _notice
from ..errors import DeviceError, KernelError, RowsError
from ..ops.rms_linear import SQUARED
from . import build, params, registry
from .background import Background, Compilation
from .build import aligned
from .forms import PLAIN, SEVERAL_SCALES, Library, Options

LIBRARIES = registry.libraries()


@functools.cache
def _tile_type(name: str) -> type:
    return namedtuple("Tile", LIBRARIES[name].tile, defaults=[1] * len(LIBRARIES[name].tile))  # type: ignore[misc]


def tile(name: str, *numbers: int) -> tuple[int, ...]:
    """A tile of the library, its numbers by name; those that are not given are 1."""
    return cast(tuple[int, ...], _tile_type(name)(*numbers))


def for_scales(name: str, count: int) -> str:
    """The name of the library that takes ``count`` global scales where ``name`` takes one."""
    return LIBRARIES[name].for_scales(count).name


def most_rows(name: str, arch: int) -> int:
    """The most activation rows of one call."""
    return LIBRARIES[name].most_rows(arch)


def kernels_for(arch: int) -> list[str]:
    """The CUDA kernels behind those that are written for ``arch``; the others may not even compile for it (wgmma, block-scaled MMA)."""
    named = {kernel.csrc for kernel in registry.kernels() if kernel.csrc and kernel.at(arch)}
    return [name for name in LIBRARIES if name.removesuffix(SEVERAL_SCALES) in named]


def libraries_for(arch: int) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    """``{name: (source, arch, defines)}`` of each of :func:`kernels_for`."""
    return {name: (LIBRARIES[name].source, arch, LIBRARIES[name].defines) for name in kernels_for(arch)}


_libraries = Background()


def start(names: Iterable[str], arch: int) -> None:
    """Begin to compile these kernels, and the binding, in the background; those that are compiled cost nothing."""
    here = [(name, arch) for name in names if name in kernels_for(arch)]
    _libraries.start({key: _compilation(*key) for key in here}, f"{{}} CUDA kernels for sm_{build.cuda_target(arch)}")
    if any(_libraries.error(key) is None for key in here):
        _start_binding()


_BINDING = ("binding", 0)


def _start_binding() -> None:
    _libraries.start({_BINDING: Compilation(build.binding_ready, build.binding_library)}, "the binding of the CUDA kernels")


def _compilation(name: str, arch: int) -> Compilation:
    library = (LIBRARIES[name].source, arch, LIBRARIES[name].defines)
    return Compilation(lambda: build.cuda_ready(*library), lambda: build.cuda_library(*library))


@functools.cache
def _library(name: str, arch: int) -> tuple[ctypes.CDLL | None, str]:
    if name not in kernels_for(arch):
        return None, f"csrc/{LIBRARIES[name].source} is not written for sm_{arch}"
    start([name], arch)
    try:
        library = ctypes.CDLL(str(_libraries.result((name, arch))))
    except (KernelError, OSError) as error:
        _tell(arch, str(error))
        return None, str(error)
    getattr(library, LIBRARIES[name].function).restype = ctypes.c_int
    return library, ""


@functools.cache
def _tell(arch: int, reason: str) -> None:
    _notice.say(f"Triton kernels, which are slower, take the place of CUDA kernels on sm_{arch}: {reason}")


def library(name: str, arch: int) -> ctypes.CDLL:
    """The kernel compiled for ``arch``.

    Raises:
        KernelError: it is not.
    """
    found, reason = _library(name, arch)
    if found is None:
        raise KernelError(
            f"csrc/{LIBRARIES[name].source} is not available",
            value=reason,
            limit=f"built for sm_{arch}",
            remedy="Call torch.ops.fp4.*, which takes another kernel then.",
        )
    return found


def why_not(name: str, arch: int) -> str:
    """Empty if the kernel is built for ``arch`` (building it takes some seconds, once); else the reason. 0 is the CPU."""
    return "" if arch == 0 else _library(name, arch)[1]


def why_never(name: str, arch: int) -> str:
    """As :func:`why_not`, without waiting: empty while the kernel is still being compiled."""
    if arch == 0 or name not in kernels_for(arch):
        return why_not(name, arch)
    start([name], arch)
    error = _libraries.error((name, arch))
    return "" if error is None else str(error)


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
def _resolve(name: bytes, arch: int, scratch: int) -> int | None:
    """The binding asks for the address of a kernel's function, or of the one that tells how much scratch memory a call takes."""
    library, _ = _library(name.decode(), arch)
    return None if library is None else params.address(library, LIBRARIES[name.decode()].function, bool(scratch))


def _current_stream() -> int | None:
    """The address of torch's function that tells the current CUDA stream; None of a torch without CUDA."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    return ctypes.cast(ctypes.CDLL(str(library)).aoti_torch_get_current_cuda_stream, ctypes.c_void_p).value if library.exists() else None


@functools.cache
def binding() -> str:
    """Load the binding (building it takes 10 to 20 seconds, once). Empty if it implements the operators from now on; else why not."""
    try:
        _start_binding()
        path = str(_libraries.result(_BINDING))
        torch.ops.load_library(path)
        library = ctypes.CDLL(path)
        library.fp4_csrc_bind(_resolve, ctypes.c_void_p(_current_stream()))
    except (KernelError, OSError, RuntimeError) as error:
        return str(error)
    _exchange.listen(functools.partial(_exchange.tell, library))
    return ""


def door(name: str, arch: int) -> str:
    """How calls reach the kernel, for ``explain()``."""
    reason = why_not(name, arch) or binding()
    return f"called through ctypes, which costs host time: {reason}" if reason else "called as a torch operator"


def extra_arguments(name: str, options: Options) -> tuple:
    """Of the operator ``name``, behind ``arch``: none where every one is the default."""
    return LIBRARIES[name].arguments(options)


def call(
    name: str,
    x: Tensor | tuple[Tensor, ...],
    weight: Sequence[Tensor],
    global_scale: Tensor,
    bias: Tensor | None,
    arch: int,
    options: Options = PLAIN,
) -> Any:
    """``[M, N]`` from ``x [M, K]``, or the parts of x, and the parts of a weight of N rows, on the current stream of their device; copies what is not dense.

    Of a library that writes sums of squares (``Library.half``): the three results that its op has.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    try:
        parts = (*(x if isinstance(x, tuple) else (x,)), *weight)
        return getattr(torch.ops.fp4_csrc, name).default(*parts, global_scale, bias, arch, *extra_arguments(name, options))
    except RuntimeError as error:
        if "fp4_csrc::" not in str(error):  # a KernelError, or torch's own: out of memory, an earlier launch that failed
            raise
        raise KernelError(f"fp4_{name} was not launched", value=str(error), limit="cudaSuccess", remedy=switch_off(name)) from error


def switch_off(name: str) -> str:
    """The remedy of an error."""
    regime = next(kernel.regime for kernel in registry.kernels() if kernel.csrc and name in (kernel.csrc, kernel.csrc + SEVERAL_SCALES))
    return f'Switch it off with fp4_inductor.dispatch(thresholds={{"{regime}": 0}}).'


def _through_ctypes(
    name: str,
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    global_scale: Tensor,
    bias: Tensor | None,
    arch: int,
    tile: Sequence[int] = (),
    more: Sequence[Any] = (),
) -> Any:
    if x[0].shape[0] > most_rows(name, arch):
        raise RowsError(
            f"fp4_{name} got more activation rows than it serves",
            value=f"M = {x[0].shape[0]}",
            limit=f"M = 1 to {most_rows(name, arch)}",
            remedy="A compiled graph that calls it was compiled for so few, and nothing checks its guards. Compile it for this M, or call torch.ops.fp4, "
            "which serves every M.",
        )
    kernel, compiled = LIBRARIES[name], library(name, arch)
    parts, given = (*kernel.activations, *kernel.weight), (*x, *weight)
    fields: dict[str, Any] = {_FIELDS.get(part, part): aligned(t) for part, t in zip(parts, given, strict=True)}
    for declared, value in zip(kernel.more, (*more, *kernel.defaults[len(more) :]), strict=True):
        fields[declared.split()[1].split("=")[0]] = aligned(value) if isinstance(value, Tensor) else value
    early = [(fields[_FIELDS.get(part, part)], t) for part, t in zip(kernel.weight, weight, strict=True)]
    if kernel.norm and fields["norm_weight"] is not None:
        early.append((fields["norm_weight"], next(value for value in reversed(more) if isinstance(value, Tensor))))
    if any(used is not t for used, t in early):
        fields["early"] = 0  # what is read early is copied right before
    fields["bias"] = None if bias is None else aligned(bias)
    if not kernel.codes:
        fields["tile"] = tuple(tile)
    (m, k), n = x[0].shape, weight[0].shape[0]
    dtype = _output_dtype(kernel, x[0].dtype, tile)
    with torch.cuda.device(x[0].device):
        y = torch.empty(m, _columns(kernel, n), dtype=dtype, device=x[0].device)
        sizes = dict(M=m, N=n, K=k * 2 if kernel.codes else k, dtype=int(dtype == torch.float16))
        written = _squares_of(y) if kernel.half == "squares" else ()
        fields |= dict(zip(("z", "squares"), written, strict=False))
        stream = torch.cuda.current_stream().cuda_stream
        filled = params.LinearParams.of(**fields, **sizes, global_scale=global_scale, y=y, stream=stream)
        status = params.call(compiled, kernel.function, filled, x[0].device)
    if status:
        value = f"cudaError {status} for M={m}, N={n}, K={k}, tile {tuple(tile)}"
        raise KernelError(f"fp4_{name} was not launched", value=value, limit="cudaSuccess", remedy=switch_off(name))
    return (y, *written) if written else y


def launch(kernel: Library, kind: type[params.Struct], given: dict[str, Any], y: Tensor, arch: int, of: str) -> None:
    """Call the function of a library that has no operator, on the current stream of the device of ``y``, its result.

    Args:
        given: the other fields of the struct ``kind``, but for scratch memory; its tensors live until then.
        of: the call in an error's words.

    Raises:
        KernelError: the launch was refused.
    """
    with torch.cuda.device(y.device):
        filled: Any = kind.of(**given, y=y, stream=torch.cuda.current_stream().cuda_stream)
        status = params.call(library(kernel.name, arch), kernel.function, filled, y.device)
    if status:
        raise KernelError(
            f"{kernel.function} was not launched", value=f"cudaError {status} for {of}", limit="cudaSuccess", remedy=switch_off(kernel.name)
        )  # fmt: skip


def _squares_of(y: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for what a library with ``half="squares"`` writes besides ``y [M, N]``."""
    return torch.empty_like(y), y.new_empty(y.shape[0], y.shape[1] // SQUARED, dtype=torch.float32)


# Parts of the operators' tensors -> fields of LinearParams, where these have other names.
_FIELDS = {"x8": "x", "x_qdata": "x", "qdata": "codes", "values": "codes"}


def _columns(kernel: Library, n: int) -> int:
    """Of the result, for a weight of ``n`` rows."""
    return n // 2 if kernel.finish == "glu" else n


def _output_dtype(kernel: Library, x: torch.dtype, half: Sequence[int]) -> torch.dtype:
    """Of a kernel whose activations are of type ``x``; ``half``: what is given in place of a tile for codes."""
    if kernel.codes:
        return torch.float16 if half and half[0] else torch.bfloat16
    return torch.bfloat16 if x == torch.float8_e4m3fn else x


DEFINITIONS = torch.library.Library("fp4_csrc", "DEF")


def _define(name: str, kernel: Library) -> None:
    parts = ", ".join(f"Tensor {part}" for part in (*kernel.activations, *kernel.weight))
    options = ", ".join((*(f"int {size}=0" for size in kernel.tile), *kernel.more))
    results = "(Tensor, Tensor, Tensor)" if kernel.half == "squares" else "Tensor"
    DEFINITIONS.define(f"{name}({parts}, Tensor global_scale, Tensor? bias, int arch, {options}) -> {results}")
    first, count, sizes = len(kernel.activations), len(kernel.activations) + len(kernel.weight), len(kernel.tile)

    def until_bound(*args) -> Any:
        """Any device, until the binding has registered itself for CUDA."""
        device = args[0].device
        if device.type != "cuda":
            raise DeviceError(f"fp4_csrc.{name} got tensors elsewhere", value=str(device), limit="cuda", remedy="Call torch.ops.fp4.*, which runs anywhere.")
        if not binding():
            return getattr(torch.ops.fp4_csrc, name).default(*args)
        global_scale, bias, arch, *extra = args[count:]
        return _through_ctypes(name, args[:first], args[first:count], global_scale, bias, arch, extra[:sizes], extra[sizes:])

    def fake(*args) -> Any:
        x, weight = args[0], args[first]
        y = x.new_empty(x.shape[0], _columns(kernel, weight.shape[0]), dtype=_output_dtype(kernel, x.dtype, args[count + 3 :]))
        return (y, *_squares_of(y)) if kernel.half == "squares" else y

    DEFINITIONS.impl(name, until_bound, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp4_csrc::{name}", fake, lib=DEFINITIONS)


for _name, _kernel in LIBRARIES.items():
    if _kernel.weight:
        _define(_name, _kernel)
