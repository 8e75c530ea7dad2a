"""Makes a vision-language model of half a million weights and pictures of shapes, trains it on a CPU, and shows what it says.

Words after the script's name override images.yaml, as in ``images.py num_steps=100``.
"""

import base64
import io
import json
import os
import sys
from pathlib import Path

import torch
from make_data import make_data
from make_model import make_model
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from burnish import SFTTrainer
from burnish.config import load_config

ROOT, HERE = Path(__file__).parents[2], Path("examples/images")
GREYS = " .:-=+*#%@"


class Viewer:
    """A model that is shown pictures, loaded with transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def answer(self, messages: list[dict], pictures: list[Image.Image]) -> str:
        """What it says after ``messages``, whose image parts are ``pictures``."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images = {}
        if pictures:
            images = dict(self.processor(images=pictures, return_tensors="pt"))
            for grid in images["image_grid_thw"]:
                placeholders = "<|image|>" * (int(grid.prod()) // 4)
                text = text.replace("<|image_pad|>", placeholders, 1)
        text = text.replace("<|image|>", "<|image_pad|>")
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        kinds = (ids == self.model.config.image_token_id).int()
        found = self.model.generate(input_ids=ids, mm_token_type_ids=kinds, **images, max_new_tokens=60)
        return self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def pictures_of(messages: list[dict]) -> list[Image.Image]:
    """The pictures of a row."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    data = [base64.b64decode(part["base64"]) for part in parts if part["type"] == "image"]
    return [Image.open(io.BytesIO(bytes_)).convert("RGB") for bytes_ in data]


def show(title: str, viewer: Viewer, rows: list[list[dict]], *, drawn: int) -> int:
    """Print what is said of the first pictures; returns how many of all answers are right."""
    print(f"\n== {title}")
    right = 0
    for number, messages in enumerate(rows):
        pictures = pictures_of(messages)
        said = viewer.answer(messages[:-1], pictures)
        right += said == messages[-1]["content"]
        if number < drawn:
            for line in zip(*map(_lines, pictures), strict=True):
                print("   ", "   ".join(line))
            print(f"    {said!r}   (right: {messages[-1]['content']!r})\n")
    print(f"  {right} of {len(rows)} answers are right")
    return right


def _lines(picture: Image.Image) -> list[str]:
    small = picture.convert("L").resize((32, 12))
    return ["".join(GREYS[9 - small.getpixel((x, y)) * 10 // 256] for x in range(32)) for y in range(12)]


def main() -> None:
    os.chdir(ROOT)
    transformers_logging.disable_progress_bar()
    make_model(HERE / "model")
    data = make_data(HERE / "data")
    config = load_config(HERE / "images.yaml", sys.argv[1:])
    rows = [json.loads(line)["messages"] for line in (data / "heldout.jsonl").read_text().splitlines()][:40]
    show("The model as it is made, with random weights", Viewer(HERE / "model"), rows[:2], drawn=1)
    progress = SFTTrainer(config).train()
    export = Path(config.export_path) / f"global_step_{progress.step}"
    if not export.exists():
        raise SystemExit(f"stopped after step {progress.step}; resume_from=latest goes on from there")
    show("The trained model, loaded with transformers, on pictures it never saw", Viewer(export), rows, drawn=3)
    for line in (Path(config.log_dir) / config.run_name / "metrics.jsonl").read_text().splitlines():
        if "eval/heldout/loss" in (numbers := json.loads(line)):
            print(f"  step {numbers['step']:>3}   held out {numbers['eval/heldout/loss']:.4f}")


if __name__ == "__main__":
    main()
