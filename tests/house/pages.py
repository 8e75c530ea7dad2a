"""The documentation, block by block: what its commands and files are."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.house.source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_EXIT = re.compile(r"# exit (\d)$")


@dataclass(frozen=True)
class Command:
    """A line of a ``bash`` block, and what it has to end with."""

    line: str
    status: int = 0

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


@dataclass(frozen=True)
class Block:
    """A fenced block with a language; one with a title is a file."""

    language: str
    title: str
    text: str

    def commands(self) -> list[Command]:
        """Those of a ``bash`` block; lines that end in a backslash go on in the next."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines() if self.language == "bash" and not self.title else []
        ends = [(line, _EXIT.search(line)) for line in lines if line.strip()]
        return [Command(line, int(end[1]) if end else 0) for line, end in ends]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {block.title: block.text for block in blocks(page) if block.title}


def inline(page: Path) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text(encoding="utf-8"))
