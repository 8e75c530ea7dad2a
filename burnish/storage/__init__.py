"""WHERE bytes are."""
