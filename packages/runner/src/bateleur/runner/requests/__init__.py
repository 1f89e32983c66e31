"""A request, and the table of those that run."""
