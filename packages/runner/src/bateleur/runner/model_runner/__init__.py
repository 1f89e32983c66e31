"""One step of the model: staged, then run in a CUDA graph or eagerly."""
