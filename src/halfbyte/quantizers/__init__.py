"""Float weights to codes."""
