"""Sampling: from logits to token ids, with draft verification and log probabilities."""
