"""WHAT a run is. Frozen models, read once, never changed. No torch."""
