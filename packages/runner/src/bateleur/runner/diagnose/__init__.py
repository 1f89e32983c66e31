"""Diagnostics: sizes of a checkpoint, its CUDA graphs, bounds of a step, and causes of rejected drafts."""
