"""What a user may set: ``--additional-config '{"fp4_inductor": {...}}'``, or ``LLM(additional_config={"fp4_inductor": {...}})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..._renamed import replaced
from ...config import DispatchConfig, NVFP4Config
from ...errors import ConfigError
from ...models.plan import Names
from ...ops.linear import WEIGHT_ONLY

KEY = "fp4_inductor"
ROUTERS = GRAPHS = ("auto", "vllm")
SALT = "salt"  # written by this package, for vLLM's cache key
_SEARCHES = ("amax", "four_over_six", "mse")


@dataclass(frozen=True)
class Settings:
    """Options of one engine.

    Args:
        prefill: arithmetic of many rows (prompts), as in :class:`fp4_inductor.NVFP4Config`: ``"auto"``, ``"fp8"`` or ``"bf16"``.
        scale_search: how a bf16 checkpoint is quantized while it loads: ``"four_over_six"``, ``"amax"`` or ``"mse"``.
        ignore: layers of a bf16 checkpoint that stay in bf16, as in :func:`fp4_inductor.quantize_model`, by vLLM's names (``"qkv_proj"``).
        bounds: numbers of tokens at which vLLM begins another compile range; None: where another kernel is ahead.
        router: who chooses the experts of a token: ``"auto"``, ``fp4.router`` where it computes what vLLM's router does, or ``"vllm"``.
        graphs: how large a step is captured in a CUDA graph: ``"auto"``, up to 2,048 tokens where a prompt would wait for the host, or ``"vllm"``.
        dispatch: fields of :class:`fp4_inductor.DispatchConfig`, which are set for the process of the engine: ``{"thresholds": {"chain": 0}}``.

    Raises:
        ConfigError: a value that is not one of these.
    """

    prefill: str = "auto"
    scale_search: str = "four_over_six"
    ignore: tuple[str, ...] = ()
    bounds: tuple[int, ...] | None = None
    router: str = "auto"
    graphs: str = "auto"
    dispatch: Any = ()
    names: Names = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        NVFP4Config(prefill=self.prefill)  # type: ignore[arg-type]
        for name, accepted in (("prefill", WEIGHT_ONLY), ("scale_search", _SEARCHES), ("router", ROUTERS), ("graphs", GRAPHS)):
            if getattr(self, name) not in accepted:
                raise ConfigError(
                    f"{KEY}: {name} cannot be served", value=repr(getattr(self, name)), limit=list(accepted), remedy="Leave it out for the default."
                )
        if self.bounds is not None and not all(type(b) is int and b > 0 for b in self.bounds):
            raise ConfigError(f"{KEY}: bounds", value=list(self.bounds), limit="numbers of tokens > 0", remedy='Write "bounds": [1, 16, 64].')
        object.__setattr__(self, "dispatch", _fields(self.dispatch))
        object.__setattr__(self, "names", Names(self.ignore))


def _fields(given: Any) -> tuple[tuple[str, Any], ...]:
    """(name, value) of each field of :class:`DispatchConfig` in ``given``, as the config has it."""
    known = [f.name for f in fields(DispatchConfig)]
    if not isinstance(given, (Mapping, tuple)) or set(dict(given)) - set(known):
        remedy = 'Write "dispatch": {"thresholds": {"chain": 0}}.'
        raise ConfigError(f"{KEY}: dispatch", value=repr(given), limit=f"an object with {', '.join(known)}", remedy=remedy)
    made = DispatchConfig(**dict(given))
    return tuple((name, getattr(made, name)) for name in sorted(dict(given)))


def settings_of(vllm_config: Any) -> Settings:
    """The options in a ``VllmConfig``, whose ``additional_config`` is a dictionary or an object of another plugin's.

    Raises:
        ConfigError: an option that does not exist, or a value that it cannot have.
    """
    given = getattr(vllm_config, "additional_config", None)
    options = given.get(KEY, {}) if isinstance(given, Mapping) else {}
    where = f'additional_config["{KEY}"]'
    options = replaced(options, where) if isinstance(options, Mapping) else options
    known = [f.name for f in fields(Settings) if f.init]
    if not isinstance(options, Mapping) or (unknown := sorted(set(options) - {*known, SALT})):
        value = unknown if isinstance(options, Mapping) else repr(options)[:80]
        raise ConfigError(f"{where} is not valid", value=value, limit=f"an object with {', '.join(known)}", remedy="Correct the names.")
    lists = {name: tuple(options[name]) for name in ("ignore", "bounds") if isinstance(options.get(name), (list, tuple))}
    return Settings(**{name: value for name, value in options.items() if name != SALT} | lists)
