"""Helpers that all rooms use."""
