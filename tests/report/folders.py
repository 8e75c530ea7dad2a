"""Folders of runs, written by hand."""

import json
from pathlib import Path

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&amp;\u2028"


def metrics_line(step, **more):
    """One line of the metrics; ``train_loss=1`` is ``train/loss``."""
    return json.dumps({"step": step} | {key.replace("_", "/", 1): value for key, value in more.items()})


def run_folder(folder: Path, lines=None, *, config='model.path: "m"\n', facts=None, answers=()):
    """A folder as a run leaves it."""
    folder.mkdir(parents=True)
    lines = [metrics_line(step, train_loss=3.0 / step) for step in (1, 2, 3)] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "config.yaml").write_text(config)
    if facts is not None:
        (folder / "data.json").write_text(json.dumps(facts))
    if answers:
        (folder / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return folder


def facts_of(name, *, text="a row"):
    """The content of data.json for one source with one row."""
    source = {"name": name, "rows": 5, "kept": 3, "dropped": {"no_target": 2}, "tokens": 30, "targets": 10}
    sample = {"source": name, "row": 4, "tokens": 7, "targets": 2, "images": []}
    return {"sources": [source], "eval_sources": [], "samples": [sample | {"spans": [[text, False], [text, True]]}]}


def hostile_run(folder: Path):
    """Everywhere a user's text can stand, one that would break out of the page."""
    numbers = {"step": 1, "train/loss": 1.0, f"train/loss/{HOSTILE}": 1.0, f"eval/{HOSTILE}/loss": 2.0, HOSTILE: 3}
    return run_folder(
        folder,
        [json.dumps(numbers), json.dumps(numbers | {"step": 2})],
        config=f"run_name: {json.dumps(HOSTILE)}\n# project_name: {json.dumps(HOSTILE)}\n{HOSTILE}: 1\n",
        facts=facts_of(HOSTILE, text=HOSTILE),
        answers=[{"step": 1, "prompt": HOSTILE, "answer": HOSTILE}],
    )
