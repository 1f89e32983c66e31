"""Rank workers: the leader, the followers, and the data-parallel coordinator."""
