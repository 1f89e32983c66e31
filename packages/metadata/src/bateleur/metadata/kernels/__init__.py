"""Triton kernels, one family a file. Importing a module of it imports Triton; importing this package does not."""
