"""How far a run has come: what a checkpoint remembers beside the weights and the place in the data."""

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """Counters of a run. JSON-ready with ``dataclasses.asdict``."""

    step: int = 0
    """Optimizer steps done, skipped ones included; 1 after the first."""
    epoch: int = 0
    """Epochs whose every row was drawn."""
    total_tokens: int = 0
    """Tokens trained on, padding not counted."""
    bad_steps: int = 0
    """Steps in a row, up to now, whose loss or gradient was not finite."""
    evaluations: int = 0
    """Evaluations so far; the one before the first step is not counted."""
