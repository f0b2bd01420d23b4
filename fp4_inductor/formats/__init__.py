"""F0: pure number formats. Torch only; knows nothing of ops, modules or kernels."""
