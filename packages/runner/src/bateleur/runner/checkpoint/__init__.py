"""Hugging Face checkpoints: families, weights, tokenizer."""
