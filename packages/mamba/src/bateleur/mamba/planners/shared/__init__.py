"""What the planners share, by form."""
