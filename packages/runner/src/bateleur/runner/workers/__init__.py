"""Processes of an engine with several ranks: leader, followers, and the data-parallel coordinator."""
