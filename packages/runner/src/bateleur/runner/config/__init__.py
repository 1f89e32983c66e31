"""Options of an engine, and the values that they get for a device and a checkpoint."""
