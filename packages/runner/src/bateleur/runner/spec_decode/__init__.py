"""Speculative decoding: drafters, when they propose, and how many drafts a step verifies."""
