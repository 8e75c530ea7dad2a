"""Two callbacks of your own.

Override the hooks you need; each is called at its event, on every rank, and may ask for a save, an evaluation or a stop. What
`state_dict` gives is kept in checkpoints.
"""

import json
import os
from pathlib import Path

from burnish.train.callbacks import Callback


class StopWhenWorse(Callback):
    """Saves at each best evaluation of an eval set, and stops after `patience` evaluations without a better one."""

    def __init__(self, name, patience=3, min_delta=0.0):
        self.key = f"eval/{name}/loss"
        self.patience = patience
        self.min_delta = min_delta
        self.best = None
        self.waited = 0

    def on_evaluate(self, progress, requests, *, metrics):
        """Numbers are those of all ranks, so all of them decide the same."""
        if self.best is None or metrics[self.key] < self.best - self.min_delta:
            self.best, self.waited = metrics[self.key], 0
            requests.save = True
        else:
            self.waited += 1
            requests.stop = self.waited >= self.patience

    def state_dict(self):
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        self.best, self.waited = state["best"], state["waited"]


class NoteJumps(Callback):
    """Writes a line with the row numbers of each step whose loss is `factor` times the mean of those before it."""

    def __init__(self, file, factor=1.5, decay=0.9):
        self.file = Path(file)
        self.factor = factor
        self.decay = decay
        self.mean = None

    def on_step_end(self, progress, requests, *, batch, result):
        if self.mean is not None and result.loss > self.factor * self.mean and os.environ.get("RANK", "0") == "0":
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as lines:
                print(json.dumps({"step": progress.step, "loss": result.loss, "rows": batch.row_numbers}), file=lines)
        self.mean = result.loss if self.mean is None else self.decay * self.mean + (1 - self.decay) * result.loss

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]
