"""What this package says in vLLM's log."""

from __future__ import annotations

from typing import Any

from .engine import init_logger

_SAID = "_fp4_inductor_said"


def say_once(text: str, compilation: Any) -> None:
    """Log ``text`` once for an engine, whose vLLM's CompilationConfig is ``compilation``."""
    said = vars(compilation).setdefault(_SAID, set())
    if text not in said:
        said.add(text)
        init_logger("vllm.fp4_inductor").info(f"fp4_inductor: {text}")
