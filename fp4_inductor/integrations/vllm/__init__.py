"""fp4_inductor inside vLLM: the entry point ``fp4_inductor`` of ``vllm.general_plugins``, and the quantization method of that name.

vLLM calls :func:`register` in every process (API server, engine core, workers). It imports no part of vLLM that compiles anything.
``docs/serving.md`` says what is served.
"""

from __future__ import annotations

import os
import warnings

NAME = "fp4_inductor"
_ANYWAY = "FP4_INDUCTOR_VLLM_UNTESTED"


def register() -> None:
    """Register the method with vLLM. May be called again, and never raises: vLLM goes on to serve other models."""
    try:
        _register()
    except Exception as error:
        warnings.warn(
            f'fp4_inductor could not register with this vLLM ({type(error).__name__}: {error}). quantization="fp4_inductor" is not there; '
            "all other models are served as before.",
            RuntimeWarning,
            stacklevel=2,
        )


def _register() -> None:
    import torch

    from . import engine

    version = engine.version()
    if version not in engine.VERSIONS and not os.environ.get(_ANYWAY):
        from .untested import config_that_refuses

        engine.register_quantization_config(NAME)(config_that_refuses(version, _ANYWAY))
        return
    from ..._torch.amx import ask_for_tiles
    from . import compiling, graphs
    from .entry import FP4Config

    engine.register_quantization_config(NAME)(FP4Config)
    compiling.register()
    engine.stream_weights(_own_weights)
    engine.add_graphs(graphs.more_tokens)
    if not torch.cuda.is_available():
        # vLLM's attention on a CPU uses AMX tiles and trusts that some oneDNN product in bfloat16 has asked the kernel for them
        # before. With our layers none has before the first prompt, and the process dies of SIGILL.
        ask_for_tiles()


def _own_weights(vllm_config, folder):
    from .config import Common
    from .weights import stream

    config = getattr(vllm_config, "quant_config", None)
    stored = config.stored if isinstance(config, Common) else None
    return None if stored is None or str(vllm_config.model_config.model) != str(folder) else stream(stored)
