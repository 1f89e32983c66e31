"""Which tokens of which requests run in a step."""
