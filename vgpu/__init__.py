"""A virtual CUDA device: exact memory accounting, kernels that do nothing."""
