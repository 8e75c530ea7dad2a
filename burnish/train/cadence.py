"""When something is due."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cadence:
    """Every so many steps, and after the last one."""

    every: int
    """0 means only at the end."""
    at_end: bool = True

    def due(self, step: int, *, last: bool) -> bool:
        """Whether it is due after ``step`` (1 is the first)."""
        return (self.every > 0 and step % self.every == 0) or (self.at_end and last)


NEVER = Cadence(0, at_end=False)
