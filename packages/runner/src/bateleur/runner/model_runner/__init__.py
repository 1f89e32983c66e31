"""One step of the model: staged, on a graph or eagerly."""
