"""What the command and the nodes of a run on Ray tell each other."""

from typing import Any, Protocol


class Board(Protocol):
    """A few facts, and lines that the command shows.

    Facts: ``begun`` (steps of the checkpoints that were there), ``stop`` (``saved`` or ``at once``), ``error`` (of a node),
    ``failed`` (a rank told an error that the user can mend), ``outcome``; and the plan of each start by its id.
    """

    def put(self, key: str, value: Any) -> None:
        """Set a fact, JSON-ready."""
        ...

    def get(self, key: str) -> Any:
        """A fact, or none."""
        ...

    def tell(self, line: str) -> None:
        """Add a line."""
        ...

    def read(self) -> list[str]:
        """The lines since it was last read."""
        ...


class BoardHere:
    """The board itself: an actor beside the command."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._lines: list[str] = []

    def put(self, key: str, value: Any) -> None:
        """As :meth:`Board.put`."""
        self._facts[key] = value

    def get(self, key: str) -> Any:
        """As :meth:`Board.get`."""
        return self._facts.get(key)

    def tell(self, line: str) -> None:
        """As :meth:`Board.tell`."""
        self._lines.append(line)

    def read(self) -> list[str]:
        """As :meth:`Board.read`."""
        lines, self._lines = self._lines, []
        return lines


class BoardThere:
    """The board in the process of ``actor``."""

    def __init__(self, actor: Any) -> None:
        import ray

        self._actor, self._result = actor, ray.get

    def put(self, key: str, value: Any) -> None:
        """As :meth:`Board.put`."""
        self._result(self._actor.put.remote(key, value))

    def get(self, key: str) -> Any:
        """As :meth:`Board.get`."""
        return self._result(self._actor.get.remote(key))

    def tell(self, line: str) -> None:
        """As :meth:`Board.tell`."""
        self._result(self._actor.tell.remote(line))

    def read(self) -> list[str]:
        """As :meth:`Board.read`."""
        lines: list[str] = self._result(self._actor.read.remote())
        return lines
