"""LoRA adapters: reading PEFT folders, and keeping several of them on the device at once."""
