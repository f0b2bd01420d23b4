"""F3: lowerings. Each op, in one regime of M, becomes kernels."""


def register() -> None:
    """Install the lowerings. Called once, when Inductor is first imported."""
    from ..kernels import operators  # noqa: F401
    from . import (
        cached_attention,
        decode_attention,
        linear,
        linear_chain,
        linear_epilogue,
        linear_fp8,
        linear_glu,
        linear_w4a4,
        moe,
        rms_linear,
        router,
        sparse_linear,
    )

    cached_attention.register()
    decode_attention.register()
    linear.register()
    linear_chain.register()
    linear_epilogue.register()
    linear_fp8.register()
    linear_glu.register()
    linear_w4a4.register()
    rms_linear.register()
    router.register()
    sparse_linear.register()
    moe.register()
