"""Processes of several ranks: the leader, followers, and the data-parallel coordinator."""
