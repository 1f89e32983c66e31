"""Options of an engine, and what they become for a device and a checkpoint."""
