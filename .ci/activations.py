"""Write csrc/common/activations.cuh from fp4_inductor/ops/activation.py: ``make activations``. lowering_tests/ops/test_activation_codes.py compares."""

from __future__ import annotations

from pathlib import Path

from fp4_inductor.ops.activation import ActivationCode

HEADER = Path(__file__).resolve().parent.parent / "csrc" / "common" / "activations.cuh"


def text() -> str:
    """The whole header."""
    names = [f"k{code.name.title().replace('_', '')}" for code in ActivationCode]
    lines = [f"  {name} = {int(code)}," for name, code in zip(names, ActivationCode, strict=True)]
    return "\n".join(
        [
            "// The numbers of activations. Written by .ci/activations.py from ActivationCode in fp4_inductor/ops/activation.py: change them there.",
            "#pragma once",
            "",
            "namespace fp4 {",
            "",
            "enum Activation {",
            *lines,
            "};",
            f"constexpr Activation kLastActivation = {names[-1]};",
            "",
            "}  // namespace fp4",
            "",
        ]
    )


if __name__ == "__main__":
    HEADER.write_text(text())
