"""Triton kernels of layers. Importing a module of it imports Triton; importing this package does not."""
