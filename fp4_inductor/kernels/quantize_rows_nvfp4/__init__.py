"""Kernel of ``fp4.quantize_rows_nvfp4``, for eager and compiled calls."""
