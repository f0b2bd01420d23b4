"""F3: graph passes. They turn what users and other libraries write into the ops of ``torch.ops.fp4``."""

from .counters import matches, reset_matches

__all__ = ["matches", "register", "reset_matches"]


def register() -> None:
    """Install the patterns and the cache salt. Called once, when Inductor is first imported."""
    from .._torch.functional import restored
    from .._torch.fx import whole_graph
    from . import (
        chain,
        dequantize_matmul,
        epilogue,
        floats,
        glu,
        identity,
        mixture,
        moe,
        norm,
        norm_router,
        quantized_cache,
        rope_attention,
        siblings,
        tables,
        topk,
    )

    whole_graph(0, restored)
    tables.register()
    floats.register()
    moe.register()
    dequantize_matmul.register()
    whole_graph(1, topk.replace)
    whole_graph(1, siblings.merge)
    whole_graph(1, glu.fuse)
    whole_graph(1, mixture.fuse)
    whole_graph(1, norm_router.fuse)
    whole_graph(1, norm.fold)
    whole_graph(1, epilogue.fuse)
    whole_graph(1, chain.fuse)
    whole_graph(1, rope_attention.fuse)
    whole_graph(1, quantized_cache.fuse)
    identity.register()
