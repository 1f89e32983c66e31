"""What a user may choose, checked."""
