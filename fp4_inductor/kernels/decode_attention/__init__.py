"""Kernels of ``fp4.decode_attention``: a few queries, with the cache's length divided among programs, and many, with what their mask leaves in."""
