"""Everything is in pyproject.toml but two things.

A wheel carries csrc/ as ``fp4_inductor/_csrc``: sources that are not compiled are compiled on the user's machine, at first use. A checkout
reads them where they lie; ``fp4_inductor._sources.csrc_dir()`` finds them in both cases.

Compiled CUDA kernels and their binding go into ``fp4_inductor/_lib``:

- ``FP4_INDUCTOR_WHEEL=1`` (``make wheel``): for every architecture, in a manylinux wheel.
- else, where nvcc and a torch with CUDA are at hand (``pip install --no-build-isolation .``: an isolated build sees no torch): for the
  architectures of TORCH_CUDA_ARCH_LIST, else for those of this machine's GPUs. ``FP4_INDUCTOR_PREBUILD=0`` leaves that to the first use.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"
WHEEL = os.environ.get("FP4_INDUCTOR_WHEEL") == "1"
# The oldest glibc of PyTorch's own wheels. .ci/wheel.py checks that nothing in the wheel needs a newer one.
PLATFORM = "manylinux_2_28_x86_64"


def architectures() -> list[int]:
    """Compute capabilities (times ten) of this machine to compile for now; empty: compile at first use."""
    if os.environ.get("FP4_INDUCTOR_PREBUILD") == "0" or not SOURCES.is_dir():
        return []
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if not (os.environ.get("CUDACXX") or shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc"))):
        return []
    try:
        import torch
    except ImportError:
        return []
    if torch.version.cuda is None:
        return []
    named = re.findall(r"(\d+)\.(\d)", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    found = [(int(a), int(b)) for a, b in named] or [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    return sorted({10 * major + minor for major, minor in found if major >= 8})


class BuildWithSources(build_py):
    @property
    def _libraries(self) -> Path:
        return Path(self.build_lib) / "fp4_inductor" / "_lib"

    def _csrc_files(self) -> dict[str, Path]:
        if self.editable_mode or not SOURCES.is_dir():
            return {}
        to = Path(self.build_lib) / "fp4_inductor" / "_csrc"
        return {str(to / p.relative_to(SOURCES)): p for p in sorted(SOURCES.rglob("*")) if p.is_file()}

    def run(self) -> None:
        super().run()
        for target, source in self._csrc_files().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(str(source), target)
        if self._csrc_files() and self.distribution.with_libraries:
            self._compile()

    def _compile(self) -> None:
        sys.path.insert(0, str(HERE))
        from fp4_inductor.errors import KernelError
        from fp4_inductor.kernels import make_wheel

        shutil.rmtree(self._libraries, ignore_errors=True)  # what an earlier build left
        if WHEEL:
            print("compiled:", *make_wheel.make(self._libraries))
            return
        try:
            built = make_wheel.make(self._libraries, self.distribution.archs, shared_runtime=False)
        except KernelError as error:  # the package works without: the first use says the same
            shutil.rmtree(self._libraries, ignore_errors=True)
            self.warn(f"CUDA kernels are left to the first use: {error}")
        else:
            print("compiled:", *built)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        compiled = sorted(map(str, self._libraries.glob("*")))
        return [*super().get_outputs(include_bytecode), *self._csrc_files(), *compiled]


class Wheel(bdist_wheel):
    """The libraries know no Python, so that one wheel serves every version of it."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", PLATFORM if WHEEL else platform


class WithLibraries(Distribution):
    archs = [] if WHEEL else architectures()
    with_libraries = WHEEL or bool(archs)

    def has_ext_modules(self) -> bool:
        return self.with_libraries  # a wheel with libraries is for one platform


setup(cmdclass={"build_py": BuildWithSources, "bdist_wheel": Wheel}, distclass=WithLibraries)
