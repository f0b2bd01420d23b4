"""Compile Triton kernels ahead of time for any architecture, and read the machine code. No GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
GB10 = 121 if VERSION >= (3, 7) else 120  # the nvdisasm of Triton 3.6 does not know sm_121


@cache
def tool(name: str) -> str:
    """nvdisasm / cuobjdump: Triton's wheel ships them."""
    shipped = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    found = str(shipped) if shipped.exists() else shutil.which(name)
    if not found:
        raise RuntimeError(f"{name} is neither in Triton's wheel nor on the PATH")
    return found


@dataclass
class Compiled:
    ptx: str
    cubin: bytes
    registers: int
    stack: int
    shared: int

    @cached_property
    def sass(self) -> str:
        """Read when it is asked for: the disassembler takes half a second to begin, a quarter longer with its analysis of the data's flow."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(self.cubin)
            f.flush()
            return subprocess.run([tool("nvdisasm"), "-c", "--no-dataflow", f.name], capture_output=True, text=True, check=True).stdout

    @property
    def spills(self) -> int:
        return len(re.findall(r"\b(?:STL|LDL)\b", self.sass)) if self.stack else 0  # they lie on the stack

    def opcodes(self) -> Counter:
        """Machine instructions by base name with modifiers, e.g. ``HMMA.16816.F32.BF16``."""
        return Counter(m.group(1) for m in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", self.sass))

    def count(self, prefix: str) -> int:
        return sum(n for op, n in self.opcodes().items() if op.startswith(prefix))


def compile_kernel(
    kernel, signature: dict, constexprs: dict, cc: int, num_warps: int = 4, num_stages: int = 2, divisible: tuple[str, ...] = (), **options
) -> Compiled:
    """``signature``: argument -> Triton type; ``divisible``: arguments known to be multiples of 16; ``options``: more of the compiler's."""
    names = kernel.arg_names
    attrs = {(names.index(a),): [["tt.divisibility", 16]] for a in divisible}
    source = ASTSource(kernel, {**signature, **dict.fromkeys(constexprs, "constexpr")}, {(names.index(k),): v for k, v in constexprs.items()}, attrs)
    done = triton.compile(source, target=GPUTarget("cuda", cc, 32), options={"num_warps": num_warps, "num_stages": num_stages, **options})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(done.asm["cubin"])
        f.flush()
        usage = subprocess.run([tool("cuobjdump"), "--dump-resource-usage", f.name], capture_output=True, text=True, check=True).stdout
    number = {k: int(v) for k, v in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return Compiled(done.asm["ptx"], done.asm["cubin"], number["REG"], number["STACK"] + number["LOCAL"], done.metadata.shared)
