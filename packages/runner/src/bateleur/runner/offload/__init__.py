"""Prefixes outside of the device: in files that other engines read."""
