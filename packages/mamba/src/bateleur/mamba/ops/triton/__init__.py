"""The operators as Triton kernels, a module for each."""
