"""What is known of a size while a graph is traced."""

from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["statically_known_true"]
