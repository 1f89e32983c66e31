"""Helpers without state that all rooms use."""
