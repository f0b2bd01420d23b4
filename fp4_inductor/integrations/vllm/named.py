"""What vLLM asks of every quantization config that goes by our name."""

from __future__ import annotations

from typing import Any

from .engine import QuantizationConfig
from .settings import KEY


class Named(QuantizationConfig):
    """A config called ``"fp4_inductor"`` that reads no files of its own and gives no layer a method."""

    def get_name(self) -> str:
        return KEY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # vLLM's message would have no remedy: check_platform

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return None
