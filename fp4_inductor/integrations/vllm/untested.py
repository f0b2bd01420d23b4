"""The method of a version of vLLM that nobody has run: it is there, so that asking for it says what to do, and it refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import ConfigError
from . import engine
from .settings import KEY


def config_that_refuses(version: str, anyway: str) -> type:
    """A quantization config that raises ConfigError where it is asked for, and nowhere else."""

    def refuse() -> NoReturn:
        raise ConfigError(
            "fp4_inductor has not been run with this vLLM",
            value=version,
            limit=list(engine.VERSIONS),
            remedy=f"Install one of these, or set {anyway}=1 to try: its internal names may have moved.",
        )

    class Untested(engine.QuantizationConfig):  # type: ignore[name-defined]
        @classmethod
        def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> str | None:
            if user_quant == KEY or str((hf_quant_cfg or {}).get("quant_method", "")).lower() == KEY:
                refuse()
            return None

        def __init__(self) -> None:
            refuse()

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            refuse()

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        def get_name(self) -> str:
            return KEY

        def get_supported_act_dtypes(self) -> list:
            return []

        def get_quant_method(self, layer: Any, prefix: str) -> None:
            return None

    return Untested
