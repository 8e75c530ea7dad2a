"""Trains a small model from scratch on a CPU and asks it the same three questions before and after.

The desk of an invented tool library: quickstart.yaml says how it is trained, facts.yaml what it learns.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from make_data import FIND_TOOL
from make_model import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from burnish import SFTTrainer
from burnish.config import load_config

HERE = Path("examples/quickstart")
SHELVES = {"ladder": {"free": True, "shelf": 6}}
Turn = dict[str, Any]


class Desk:
    """A model and its tokenizer, to be asked."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def turn(self, messages: list[Turn], *, tools: list[Turn] | None = None) -> str:
        """What the model says next."""
        prompt = self.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ids = self.model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def ask(self, *questions: str, tools: list[Turn] | None = None) -> str:
        """The answer to the last of ``questions``; a tool the model calls on the way is looked up."""
        messages: list[Turn] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            said = self.turn(messages, tools=tools)
            item = called_item(said)
            if item in SHELVES:
                messages.append({"role": "assistant", "content": said})
                messages.append({"role": "tool", "name": "find_tool", "content": json.dumps(SHELVES[item])})
                said = self.turn(messages, tools=tools)
            messages.append({"role": "assistant", "content": said})
        return said


def called_item(said: str) -> str:
    """What the model wants looked up; empty when it calls no tool."""
    try:
        return str(json.loads(said.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["item"])
    except (ValueError, KeyError, TypeError):
        return ""


def show(desk: Desk) -> None:
    """Three questions in wordings that stand in no training row: one alone, one after another, one for a tool."""
    print("  Good morning, what is your opening time?")
    print("   ", repr(desk.ask("Good morning, what is your opening time?")))
    print("  (after that) And what do I pay if I am late?")


def main() -> None:
    os.chdir(Path(__file__).parents[2])


if __name__ == "__main__":
    main()
