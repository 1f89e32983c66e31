"""Triton forms of the operators, with the same names, arguments and results as in `ops`."""
