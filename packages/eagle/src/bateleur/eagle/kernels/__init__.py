"""Triton forms of the eagle functions, for CUDA. Importing a module of it imports Triton; importing this does not."""
