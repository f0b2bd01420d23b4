"""Kernels of ``fp4.quantize_rows_fp8``, for eager calls (compiled graphs fuse the plain operations instead), and of ``fp4.quantize_glu_rows_fp8``."""
