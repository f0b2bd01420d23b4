"""Kernel of ``fp4.topk``."""
