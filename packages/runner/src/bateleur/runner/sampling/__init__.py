"""From logits to token ids."""
