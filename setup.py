"""Everything is in pyproject.toml but two things.

A wheel carries csrc/ as ``fp4_inductor/_csrc``: the C and CUDA sources are compiled on the user's machine, at first use. A checkout
reads them where they lie; ``fp4_inductor._sources.csrc_dir()`` finds them in both cases.

Where nvcc and a torch with CUDA are at hand while the wheel is built (``pip install --no-build-isolation .``: an isolated build sees no
torch), the CUDA kernels and their binding are compiled there and then, into ``fp4_inductor/_lib``, for the architectures of
TORCH_CUDA_ARCH_LIST, else for those of this machine's GPUs. ``FP4_INDUCTOR_PREBUILD=0`` leaves that to the first use.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
SOURCES = HERE / "csrc"


def architectures() -> list[int]:
    """Compute capabilities (times ten) to compile for now; empty: compile at first use."""
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
        if self._csrc_files() and self.distribution.archs:
            self._compile(self.distribution.archs)

    def _compile(self, archs: list[int]) -> None:
        sys.path.insert(0, str(HERE))
        from fp4_inductor.errors import KernelError
        from fp4_inductor.kernels import build, csrc

        try:
            built = build.prebuild(
                Path(self.build_lib) / "fp4_inductor" / "_lib", [(csrc.KERNELS[name].source, arch) for arch in archs for name in csrc.kernels_for(arch)]
            )
        except KernelError as error:  # the package works without: the first use says the same
            self.warn(f"CUDA kernels are left to the first use: {error}")
        else:
            print(f"compiled for {', '.join(f'sm_{arch}' for arch in archs)}: {', '.join(path.name for path in built)}")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        compiled = sorted(map(str, (Path(self.build_lib) / "fp4_inductor" / "_lib").glob("*.so")))
        return [*super().get_outputs(include_bytecode), *self._csrc_files(), *compiled]


class WithLibraries(Distribution):
    archs = architectures()

    def has_ext_modules(self) -> bool:
        return bool(self.archs)  # a wheel with libraries is for one platform


setup(cmdclass={"build_py": BuildWithSources}, distclass=WithLibraries)
