"""Triton forms of the operators, which have the names and arguments of the operators."""
