"""Diagnostics: sizes of a checkpoint, its CUDA graphs, lower bounds of a step's time, and causes of rejected drafts."""
