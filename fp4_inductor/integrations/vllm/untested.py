"""The method of a version of vLLM that nobody has run: it is there, so that asking for it says what to do, and it refuses."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import ConfigError
from . import engine
from .named import Named
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

    class Untested(Named):
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

        def get_supported_act_dtypes(self) -> list:
            return []

    return Untested
