"""What the operators share, by form."""
