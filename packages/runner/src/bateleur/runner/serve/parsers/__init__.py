"""Parsers of what models write, calls of tools and reasoning, by name: pure functions of text."""
