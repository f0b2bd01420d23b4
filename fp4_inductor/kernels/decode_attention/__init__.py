"""Kernels of ``fp4.decode_attention``: the cache read once, grouped by KV head, its length divided among programs."""
