"""A GenerationConfig that has all that ``model.generate`` would put into one: the model's own values, then those of the call.

``generate()`` reads the call's options before it hands them on. Without a config ``model.generate`` does the same again, and looks for parameters of generation
in ``model.config``, for which it makes a default config of the model's class. That takes longer than everything else ahead of the first token.
"""

from __future__ import annotations

import functools
from typing import Any

# The lengths that are not given stay None: generate() asks for that before it fills them in.
_LENGTHS = ("max_length", "min_length")


@functools.cache
def _complete() -> type:
    from transformers import GenerationConfig

    class Complete(GenerationConfig):
        """What is None in it was said to be None (``eos_token_id=None``), so that defaults fill in nothing but lengths."""

        def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
            if defaults_only:
                kwargs = {name: value for name, value in kwargs.items() if name in _LENGTHS}
            return super().update(defaults_only, allow_custom_entries, **kwargs)

    return Complete


def of(model: Any, given: Any, options: dict[str, Any]) -> Any:
    """The GenerationConfig that ``model.generate`` will make of its argument ``given`` and of ``options``."""
    from transformers import GenerationConfig

    config, _ = model._prepare_generation_config(GenerationConfig() if given is None else given)
    config.update(**options)
    return config


def handed_on(model: Any, config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``model.generate`` for ``options``, of which ``of`` has made ``config``, and which may have got others since.

    They are ``options`` as they are if a config is among them, or if ``model.config`` has parameters of generation, for Transformers refuses some of these.
    """
    looked_for = _looked_for()
    if options.get("generation_config") is not None or not looked_for or any(getattr(model.config, name, None) is not None for name in looked_for):
        return options
    for name in _LENGTHS:
        setattr(config, name, options.get(name))
    config.__class__ = _complete()
    return {name: value for name, value in options.items() if not hasattr(config, name)} | {"generation_config": config}


@functools.cache
def _looked_for() -> tuple[str, ...]:
    """The names of the parameters that Transformers looks for in a model's config; none: this Transformers does not tell."""
    from transformers import GenerationConfig

    told = getattr(GenerationConfig, "_get_default_generation_params", dict)
    return tuple(name for name in told() if name != "use_cache")
