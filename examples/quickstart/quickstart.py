"""Trains a model of a million weights from scratch on a CPU, and asks it the same three questions before and after.

facts.yaml is what it learns, quickstart.yaml how. The questions are worded as in no training row. Words after the
script's name override the config, as in ``quickstart.py num_steps=100``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from make_data import FIND_TOOL
from make_model import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from burnish import SFTTrainer
from burnish.config import load_config

ROOT = Path(__file__).parents[2]
MODEL = Path("examples/quickstart/model")
CONVERSATIONS = (
    ["Good morning, what number can I call?"],
    ["I like your cat.", "Thanks, what is the price of membership?"],
    ["Hello, look up the ladder for me."],
)
SHELVES = {"ladder": {"free": True, "shelf": 3}}
Turn = dict[str, Any]


class Desk:
    """A model that answers questions, with one tool to call."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def talk(self, questions: list[str]) -> list[Turn]:
        """The conversation: each question, the tool's result where the model calls it, each answer."""
        turns: list[Turn] = []
        for question in questions:
            turns.append({"role": "user", "content": question})
            turns.append(self.answer(turns))
            if found := look_up(turns[-1]["content"]):
                turns.append({"role": "tool", "content": found})
                turns.append(self.answer(turns))
        return turns

    def answer(self, turns: list[Turn]) -> Turn:
        prompt = self.tokenizer.apply_chat_template(
            turns, tools=[FIND_TOOL], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = self.model.generate(**prompt, max_new_tokens=40)[0, prompt["input_ids"].shape[1] :]
        return {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}


def look_up(said: str) -> str | None:
    """What the shelves say of the tool the model asks for; none when it asks for no tool."""
    call = said.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        return json.dumps(SHELVES[json.loads(call)["arguments"]["item"]])
    except (ValueError, LookupError, TypeError):
        return None


def show(title: str, desk: Desk) -> None:
    """Print what the desk says in each conversation."""
    print(f"\n== {title}")
    for questions in CONVERSATIONS:
        for turn in desk.talk(questions):
            print(f"  {turn['role']:>9}: {' '.join(turn['content'].split())[:100]}")
        print()


def show_curve(metrics: Path) -> None:
    """Print the losses at each evaluation."""
    print(f"== {metrics}")
    for line in metrics.read_text().splitlines():
        numbers = json.loads(line)
        if "eval/heldout/loss" in numbers:
            trained = f"{numbers['train/loss']:.4f}" if "train/loss" in numbers else "     -"
            print(f"  step {numbers['step']:>3}   train {trained}   held out {numbers['eval/heldout/loss']:.4f}")


def main() -> None:
    os.chdir(ROOT)
    transformers_logging.disable_progress_bar()
    config = load_config(Path("examples/quickstart/quickstart.yaml"), sys.argv[1:])
    show("The model as it is made, with random weights", Desk(make_model(MODEL)))
    progress = SFTTrainer(config).train()
    export = Path(config.export_path) / f"global_step_{progress.step}"
    if not export.exists():
        raise SystemExit(f"stopped after step {progress.step}; resume_from=latest goes on from there")
    show("The trained model, loaded with transformers", Desk(export))
    run = Path(config.log_dir) / config.run_name
    show_curve(run / "metrics.jsonl")
    print(f"\nmodel: {export}\ncheckpoint: {config.ckpt_path}\nmetrics and config: {run}")


if __name__ == "__main__":
    main()
