"""facts.yaml -> data/train.jsonl and data/heldout.jsonl: short questions, answered like a pirate. The same bytes at every call."""

import json
import random
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
HELD_OUT_EVERY = 8


def make() -> dict[str, str]:
    """File name -> its text. A held-out item is asked in one wording, in turn; the others in all."""
    train, heldout = [], []
    for kind in yaml.safe_load((FOLDER / "facts.yaml").read_text()).values():
        for i, (item, fact) in enumerate(kind["items"].items()):
            answer = kind["answer"].format(item=item, fact=fact)
            rows = [chat(wording.format(item=item), answer) for wording in kind["wordings"]]
            if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
                heldout.append(rows[i // HELD_OUT_EVERY % len(rows)])
            else:
                train += rows
    random.Random(1).shuffle(train)
    return {"train.jsonl": "".join(train), "heldout.jsonl": "".join(heldout)}


def chat(question: str, answer: str) -> str:
    """One line of JSON."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


if __name__ == "__main__":
    for name, text in make().items():
        (FOLDER / "data" / name).write_text(text)
        print(f"examples/smollm2/data/{name}: {text.count(chr(10))} rows")
