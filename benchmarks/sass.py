"""Count machine instructions a weight in the main loop of a csrc/ kernel: ``python benchmarks/sass.py linear_small [--arch 90]``.

No GPU needed. The loop is the smallest one that multiplies; ``ALU`` are the instructions of the integer pipe, half as wide as the issue.
At 4.3 TB/s an H200 has issue slots for about 4 instructions a dense weight (2 of them ALU) and 2.9 (1.45) an original weight of 2:4.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4_inductor.kernels import build, csrc
from lowering_tests.kernels import aot

ALU = ("LOP3", "SHF", "PRMT", "ISETP", "SEL", "VIADD", "IADD3", "LEA", "VIADDMNMX", "VIMNMX", "IMNMX", "F2FP", "PLOP3", "SGXT")
# where the template's integers hold the tokens of a tile, in eights
TOKENS = {"linear_small": 0, "sparse_linear_small": 0}  # linear_wide: one wgmma takes all, 16 rows a warp


def loops(library: Path):
    """``(function, instructions of its smallest loop with an MMA)``."""
    text = subprocess.run([aot.tool("cuobjdump"), "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    for part in text.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        found = [(int(at, 16), op.strip()) for at, op in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", body)]
        best: list[str] = []
        for at, op in found:
            jump = re.search(r"\bBRA\S* (?:\S+, )?0x([0-9a-f]+)", op)
            if jump and int(jump[1], 16) <= at:
                loop = [o for a, o in found if int(jump[1], 16) <= a <= at]
                if any("GMMA" in o or "HMMA" in o for o in loop) and (not best or len(loop) < len(best)):
                    best = loop
        yield name, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=list(csrc.LIBRARIES))
    parser.add_argument("--arch", type=int, default=90)
    args = parser.parse_args()
    kernel = csrc.LIBRARIES[args.kernel]
    for name, loop in sorted(loops(build.cuda_library(kernel.source, args.arch, kernel.defines))):
        sizes = [int(i) for i in re.findall(r"Li(\d+)E", name)]
        ops = Counter(re.sub(r"^@!?U?P\w+\s+", "", op).split()[0].split(".")[0] for op in loop)
        products = [op for op in loop if "GMMA" in op or "HMMA" in op]
        if not products or not sizes:
            continue
        tiles = sizes[TOKENS[Path(kernel.source).stem]] if Path(kernel.source).stem in TOKENS else 1
        weights = len(products) / tiles * 256 * (2 if "MMA.SP" in products[0] else 1) / 32  # a lane
        integer = sum(ops[op] for op in ALU)
        dtype = "bf16" if "bfloat16" in name else "f16 "
        print(
            f"{args.kernel} {dtype} {sizes} {len(loop):5} instructions, {len(loop) / weights:.2f} a weight, ALU {integer / weights:.2f}  {dict(ops.most_common(8))}"
        )


if __name__ == "__main__":
    main()
