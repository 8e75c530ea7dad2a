"""facts.yaml -> data/train.jsonl and data/heldout.jsonl: chat rows with one turn, with several, and with tools.

The same bytes at every call. A wording that is held out stands in no training row, nor does a tool and shelf that are.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
HELD_OUT_EVERY = 6
FIND_TOOL = {
    "type": "function",
    "function": {
        "name": "find_tool",
        "description": "Look a tool up on the shelves",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Side:
    """What one side of the split may say: its wordings of every fact and of the question for a tool, its shelves."""

    facts: dict[str, list[str]]
    """Answer -> wordings of the question."""
    tool_wordings: list[str]
    shelved: list[tuple[str, int]]
    """Pairs of tool and shelf."""


def split(page: dict[str, Any], *, held_out: bool) -> Side:
    def part(values: list[Any]) -> list[Any]:
        return [v for i, v in enumerate(values) if (i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) is held_out]

    tool = page["tool"]
    pairs = [(item, shelf) for item in tool["items"] for shelf in tool["shelves"]]
    return Side(
        facts={f"{fact['answer']} {page['sign_off']}": part(fact["wordings"]) for fact in page["facts"].values()},
        tool_wordings=part(tool["wordings"]),
        shelved=part(pairs),
    )


class Desk:
    """Writes rows of one side. Every draw comes from one generator, so the seed decides all of them."""

    def __init__(self, page: dict[str, Any], *, side: Side, seed: int) -> None:
        self.page = page
        self.side = side
        self.random = random.Random(seed)

    def question(self, wording: str, *, first: bool) -> str:
        """The wording as it stands, or after an opening of the first or of a later turn."""
        if self.random.random() < 0.5:
            return wording
        opening: str = self.random.choice(self.page["openings" if first else "follow_ups"])
        own_name = wording.startswith(("I ", "Ada "))
        return opening + (wording if opening.endswith(". ") or own_name else wording[0].lower() + wording[1:])

    def fact(self, wording: str, answer: str, *, first: bool) -> list[Row]:
        return [
            {"role": "user", "content": self.question(wording, first=first)},
            {"role": "assistant", "content": answer},
        ]

    def any_fact(self, *, first: bool) -> list[Row]:
        answer = self.random.choice(list(self.side.facts))
        return self.fact(self.random.choice(self.side.facts[answer]), answer, first=first)

    def lookup(self, wording: str, *, first: bool) -> list[Row]:
        """Four turns: the question, the call, what the shelves say, the answer."""
        tool = self.page["tool"]
        item, shelf = self.random.choice(self.side.shelved)
        day = self.random.choice(tool["days"])
        free = self.random.random() < 0.7
        found = {"free": True, "shelf": shelf} if free else {"free": False, "back": day}
        said = tool["free" if free else "out"].format(item=item, shelf=shelf, day=day)
        call = {"type": "function", "function": {"name": "find_tool", "arguments": {"item": item}}}
        return [
            {"role": "user", "content": self.question(wording.format(item=item), first=first)},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "find_tool", "content": json.dumps(found)},
            {"role": "assistant", "content": f"{said} {self.page['sign_off']}"},
        ]

    def any_lookup(self, *, first: bool) -> list[Row]:
        return self.lookup(self.random.choice(self.side.tool_wordings), first=first)

    def tools(self) -> list[Row] | None:
        """The tool, in some of the rows that need none."""
        return [FIND_TOOL] if self.random.random() < 0.12 else None

    def rows(self, *, conversations: int, lookups: int) -> list[Row]:
        """Each wording of each fact once, then conversations of two or three facts, then lookups, shuffled."""
        rows: list[Row] = []
        for answer, wordings in self.side.facts.items():
            for wording in wordings:
                rows.append(row(self.fact(wording, answer, first=True), tools=self.tools()))
        for _ in range(conversations):
            turns = self.any_fact(first=True)
            for _ in range(self.random.choice((1, 1, 2))):
                turns += self.any_fact(first=False)
            rows.append(row(turns, tools=self.tools()))
        for i in range(lookups):
            wording = self.side.tool_wordings[i % len(self.side.tool_wordings)]
            turns = self.lookup(wording, first=True)
            for _ in range(self.random.choice((1, 2, 2))):
                turns += self.any_fact(first=False) if self.random.random() < 0.2 else self.any_lookup(first=False)
            rows.append(row(turns, tools=[FIND_TOOL]))
        self.random.shuffle(rows)
        return rows


def row(messages: list[Row], *, tools: list[Row] | None) -> Row:
    return {"messages": messages} | ({"tools": tools} if tools else {})


def make() -> dict[str, str]:
    """File name -> its text."""
    page = yaml.safe_load((FOLDER / "facts.yaml").read_text())
    train = Desk(page, side=split(page, held_out=False), seed=1).rows(conversations=200, lookups=130)
    heldout = Desk(page, side=split(page, held_out=True), seed=2).rows(conversations=20, lookups=25)
    files = {"train.jsonl": train, "heldout.jsonl": heldout}
    return {name: "".join(json.dumps(r) + "\n" for r in rows) for name, rows in files.items()}


if __name__ == "__main__":
    for name, text in make().items():
        (FOLDER / "data" / name).write_text(text)
        print(f"examples/quickstart/data/{name}: {text.count(chr(10))} rows")
