"""Device memory of requests: KV blocks, recurrent states, and the prefix cache."""
