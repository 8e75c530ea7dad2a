"""Makes a vision-language model of half a million weights and pictures of shapes, trains it on a CPU, and shows what it says, also on a page.

Words after the script's name override images.yaml, as in ``images.py num_steps=100``.
"""

import base64
import html
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
PAGE = """<!doctype html><meta charset="utf-8"><title>images</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
figure {{ display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top; width: 12rem }}
img {{ width: 5rem; image-rendering: pixelated }}
</style>
<h3>Loss on held-out pictures</h3><table>{losses}</table>
<h3>Held-out pictures: {right} of {count} answers are right</h3>{figures}
"""


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


def show(title: str, viewer: Viewer, rows: list[list[dict]], *, drawn: int) -> list[str]:
    """Print what is said of the first pictures, and how many of all answers are right; returns all that is said."""
    print(f"\n== {title}")
    answers = []
    for number, messages in enumerate(rows):
        pictures = pictures_of(messages)
        said = viewer.answer(messages[:-1], pictures)
        answers.append(said)
        if number < drawn:
            for line in zip(*map(_lines, pictures), strict=True):
                print("   ", "   ".join(line))
            print(f"    {said!r}   (right: {messages[-1]['content']!r})\n")
    print(f"  {count_right(rows, answers)} of {len(rows)} answers are right")
    return answers


def count_right(rows: list[list[dict]], answers: list[str]) -> int:
    return sum(said == messages[-1]["content"] for messages, said in zip(rows, answers, strict=True))


def write_page(file: Path, rows: list[list[dict]], answers: list[str], losses: dict[int, float]) -> None:
    """The pictures and the answers, beside the losses by step; nothing outside of the file is needed."""
    figures = ""
    for messages, said in zip(rows, answers, strict=True):
        data = [base64.b64encode(as_png(picture)).decode() for picture in pictures_of(messages)]
        shown = " ".join(f'<img src="data:image/png;base64,{each}">' for each in data)
        mark = "&#10003;" if said == messages[-1]["content"] else "&#10007;"
        figures += f"<figure>{shown}<figcaption>{mark} {html.escape(said)}</figcaption></figure>\n"
    lines = "".join(f"<tr><td>step {step}<td>{loss:.4f}" for step, loss in losses.items())
    page = PAGE.format(losses=lines, right=count_right(rows, answers), count=len(rows), figures=figures)
    file.write_text(page, encoding="utf-8")


def as_png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


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
    trained = "The trained model, loaded with transformers, on pictures it never saw"
    answers = show(trained, Viewer(export), rows, drawn=3)
    run = Path(config.log_dir) / config.run_name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval/heldout/loss"] for line in lines if "eval/heldout/loss" in line}
    for step, loss in losses.items():
        print(f"  step {step:>3}   held out {loss:.4f}")
    write_page(run / "images.html", rows, answers, losses)
    print(f"page: {run / 'images.html'}")


if __name__ == "__main__":
    main()
