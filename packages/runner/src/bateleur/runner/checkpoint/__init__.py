"""Hugging Face checkpoints: families, weights, tokenizer."""

from bateleur.runner.checkpoint.open import (
    Checkpoint,
    load_model,
    open_checkpoint,
    resolve_dtype,
)
from bateleur.runner.checkpoint.tokenizer import load_tokenizer

__all__ = ["Checkpoint", "load_model", "load_tokenizer", "open_checkpoint", "resolve_dtype"]
