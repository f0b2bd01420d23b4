"""F3: graph passes. They turn what users and other libraries write into the ops of ``torch.ops.fp4``."""


def register() -> None:
    """Install the patterns and the cache salt. Called once, when Inductor is first imported."""
