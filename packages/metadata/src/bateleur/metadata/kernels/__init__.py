"""Triton kernels. Importing this package does not import Triton; importing one of its modules does."""
