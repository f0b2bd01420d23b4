"""F3: lowerings. Each op, in one regime of M, becomes kernels."""


def register() -> None:
    """Install the lowerings. Called once, when Inductor is first imported."""
    from . import linear, moe, sparse_linear

    linear.register()
    sparse_linear.register()
    moe.register()
