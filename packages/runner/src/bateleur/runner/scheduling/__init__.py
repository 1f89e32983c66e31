"""Scheduling: the request queue, the scheduler, and the batch of a step."""
