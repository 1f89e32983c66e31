"""Ways of capturing: on a CUDA device, recorded on CPU with the same semantics, or none."""
