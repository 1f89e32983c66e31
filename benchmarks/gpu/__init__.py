"""GPU bring-up: correctness checks, the project's GPU tests and step times, in one command. See docs/gpu.md."""
