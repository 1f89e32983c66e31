"""KV offload: cached prefixes in host memory, on disk, and in files for other engines."""
