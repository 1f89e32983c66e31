"""Text that follows a grammar: which tokens may come next."""
