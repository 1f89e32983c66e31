"""Parsers of model output. `ChatFormat.prepare` returns the reader of an answer, which yields events for every API."""
