"""Parts of the training of the shipped draft head; `tools/train_draft.py` is the command."""
