"""Several processes (ranks) that form one engine: ranks, their collectives, and their supervision."""
