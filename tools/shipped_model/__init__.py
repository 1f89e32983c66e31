"""Parts of the training of the shipped model; `tools/train_model.py` is the command."""
