"""Nothing -> data/train.jsonl and data/heldout.jsonl: pictures of coloured shapes, and what is asked and said of them.

Pictures are drawn at random places and in random sizes, so that no held-out picture is one of the trained ones. Some rows
have two pictures, and some none.
"""

import base64
import io
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent / "data"
SIDE = 32
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 200, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTIONS = ("What is this?", "What do you see?", "Name the shape.")


def draw(colour: str, shape: str, chance: random.Random) -> Image.Image:
    """A picture of one shape on a light ground."""
    picture = Image.new("RGB", (SIDE, SIDE), (chance.randint(225, 255),) * 3)
    pen, size = ImageDraw.Draw(picture), chance.randint(14, 24)
    left, top = chance.randint(1, SIDE - size - 2), chance.randint(1, SIDE - size - 2)
    right, bottom, middle = left + size, top + size, left + size // 2
    fill = COLOURS[colour]
    if shape == "circle":
        pen.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        pen.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "triangle":
        pen.polygon([(middle, top), (right, bottom), (left, bottom)], fill=fill)
    else:
        pen.line((left, top, right, bottom), fill=fill, width=4)
        pen.line((left, bottom, right, top), fill=fill, width=4)
    return picture


def encoded(picture: Image.Image) -> str:
    """As text in a row of JSON."""
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def make_row(chance: random.Random) -> dict:
    """One conversation."""
    things = [(chance.choice(list(COLOURS)), chance.choice(SHAPES)) for _ in range(chance.choice((1, 1, 1, 2)))]
    if chance.random() < 0.1:
        turns = [("Hello!", "Hello! Show me a shape.")]
        return {"messages": [turn for pair in turns for turn in _turns(pair[0], pair[1])]}
    said = " and ".join(f"a {colour} {shape}" for colour, shape in things)
    parts = [{"type": "image", "base64": encoded(draw(colour, shape, chance))} for colour, shape in things]
    question = {"type": "text", "text": chance.choice(QUESTIONS)}
    return {"messages": _turns([*parts, question], f"It is {said}.")}


def _turns(asked: str | list, said: str) -> list[dict]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def make_data(folder: Path = FOLDER, *, train: int = 1600, heldout: int = 100, seed: int = 0) -> Path:
    """Write both files into ``folder``, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    for name, count in (("train", train), ("heldout", heldout)):
        rows = [json.dumps(make_row(chance)) + "\n" for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


if __name__ == "__main__":
    print(make_data())
