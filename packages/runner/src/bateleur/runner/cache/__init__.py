"""Memory of sequences: KV blocks, Mamba state pages, and the prefixes that requests share."""
