"""Drafts: the head beside its target, and when it proposes."""
