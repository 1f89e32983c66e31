"""Hugging Face checkpoints: configuration, weights and tokenizer of each model family."""
