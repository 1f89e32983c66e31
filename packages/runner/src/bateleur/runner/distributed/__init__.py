"""Several processes that are one engine: which rank this one is, and what ranks exchange."""
