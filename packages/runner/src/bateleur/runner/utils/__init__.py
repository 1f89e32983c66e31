"""Helpers for all parts of the runner."""
