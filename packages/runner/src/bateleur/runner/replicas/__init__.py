"""Replicas of an engine on Ray: one HTTP address for all of them, and batches that run on all of them."""
