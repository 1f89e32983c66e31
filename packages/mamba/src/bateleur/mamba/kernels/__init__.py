"""Triton forms of the planners."""
