"""Quantised checkpoints: their configuration, and a reader for each format. All formats become `QuantizedMatrix`."""
