"""Kernels of ``fp4.linear_glu``: act(gate) * up behind the two halves of one weight, in one launch."""
