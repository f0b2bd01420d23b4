"""F3: lowerings. Each op, in one regime of M, becomes kernels."""


def register() -> None:
    """Install the lowerings. Called once, when Inductor is first imported."""
    from . import linear, linear_epilogue, linear_fp8, linear_glu, moe, sparse_linear

    linear.register()
    linear_epilogue.register()
    linear_fp8.register()
    linear_glu.register()
    sparse_linear.register()
    moe.register()
