"""A request, and the table of running requests."""
