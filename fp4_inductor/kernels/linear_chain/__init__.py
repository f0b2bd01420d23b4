"""Kernels of ``fp4.linear_chain``: several products of one row in one launch."""
