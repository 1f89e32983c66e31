"""The step as a whole, and what goes in and comes out."""
