"""LoRA adapters: reading PEFT folders, and storing several of them on the device at once."""
