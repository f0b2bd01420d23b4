"""Kernel of ``fp4.quantize_rows_fp8``, for eager calls; compiled graphs fuse the plain operations instead."""
