"""Triton implementations of functions of `bateleur.eagle`. Importing a module imports Triton; this package does not."""
