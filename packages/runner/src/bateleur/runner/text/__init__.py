"""Token ids and text."""
