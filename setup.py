"""Everything is in pyproject.toml but one thing: a wheel carries csrc/ as ``fp4_inductor/_csrc``.

The C and CUDA sources are compiled on the user's machine, at first use. A checkout reads them where they lie;
``fp4_inductor._sources.csrc_dir()`` finds them in both cases.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCES = Path(__file__).parent / "csrc"


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

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *self._csrc_files()]


setup(cmdclass={"build_py": BuildWithSources})
