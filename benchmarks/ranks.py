"""Several ranks and checkpoints: `python -m benchmarks.ranks [width=512] [layers=8] [steps=200] [ranks=2]`.

First the training thread's time in `save()`, beside a synchronous save of the same tensors by the same library
(`torch.distributed.checkpoint.save`), in turns, onto the disk of the temporary folder. Then what a step of a tiny model
takes on several ranks beside its forward, backward and optimizer: drawing and planning rows, the ranks' agreement,
metrics, their log. Then how long a run over a billion rows takes to find its place again. Seconds on the clock: the
middle of the turns.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_at_once

from burnish.backends.comm import joined
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.bench.rows import draw_lengths, write_rows
from burnish.data.packing import Layout
from burnish.data.samplers import DataMixingSampler, RandomSampler
from burnish.models.blank import write_blank
from burnish.train.callbacks import Callback, Requests
from burnish.train.progress import Progress

TURNS = 5
VOCABULARY = 8192
BILLION = 10**9


def write_model(folder: Path, *, width: int, layers: int) -> None:
    shape = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width // 4,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    write_blank(folder, shape=shape, dtype=torch.float32, device="cpu")


def saving(folder: Path, *, width: int, layers: int) -> None:
    write_model(folder / "model", width=width, layers=layers)
    begun, whole, at_once = [], [], []
    with joined() as ranks:
        backend = FsdpBackend(ranks=ranks, layout=Layout(), model_path=str(folder / "model"), num_steps=1)
        size = sum(
            t.numel() * t.element_size()
            for kind in backend._tensors(weights_only=False).values()
            for t in kind.values()
        )
        for turn in range(TURNS):
            began = time.perf_counter()
            save_at_once(
                backend._tensors(weights_only=False), storage_writer=FileSystemWriter(folder / f"at-once-{turn}")
            )
            at_once.append(time.perf_counter() - began)
            began = time.perf_counter()
            pending = backend.save(folder / f"behind-{turn}")
            begun.append(time.perf_counter() - began)
            pending.wait()
            whole.append(time.perf_counter() - began)
        backend.close()
    print(f"| a checkpoint of {size / 2**20:,.0f} MiB | training waits, s | until it is written, s |\n|---|---|---|")
    for name, waited, took in (
        ("Burnish, save()", begun, whole),
        ("torch.distributed.checkpoint.save", at_once, at_once),
    ):
        print(f"| {name} | {statistics.median(waited):.3f} | {statistics.median(took):.3f} |")
    print(f"\nthe first by the second: {statistics.median(begun) / statistics.median(at_once):.1%}")


class Clock(Callback):
    """Writes the moment at which each step begins, on the first rank."""

    def __init__(self, out: str) -> None:
        self._out = Path(out) if os.environ["RANK"] == "0" else Path(os.devnull)
        self._begun: list[float] = []

    def on_step_begin(self, progress: Progress, requests: Requests) -> None:
        self._begun.append(time.perf_counter())

    def on_train_end(self, progress: Progress, requests: Requests) -> None:
        self._out.write_text(json.dumps(self._begun))


def stepping(folder: Path, *, steps: int, ranks: int) -> None:
    write_model(folder / "tiny", width=32, layers=2)
    lengths = draw_lengths("lognormal", count=8 * steps, mean=24, cv=1.0, longest=128)
    write_rows(folder / "rows.arrow", lengths, vocabulary=VOCABULARY, target_share=0.5)
    words = {
        "model.path": folder / "tiny",
        "pretokenized_dataset_paths": folder / "rows.arrow",
        "placement.num_gpus_per_node": ranks,
        "num_steps": steps,
        "batch_size": 8,
        "max_length": 128,
        "use_sequence_packing": True,
        "log_dir": folder / "runs",
        "cache_dir": folder / "cache",
        "dataloader_num_workers": 2,
        "callbacks": json.dumps([{"benchmarks.ranks.Clock": {"out": str(folder / "begun.json")}}]),
    }
    command = [sys.executable, "-m", "burnish", "train", *(f"{key}={value}" for key, value in words.items())]
    subprocess.run(command, check=True, capture_output=True)
    begun = json.loads((folder / "begun.json").read_text())
    lines = [json.loads(line) for line in (folder / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()]
    inside = [line["timing/forward_backward"] + line["timing/optimizer"] for line in lines][:-1]
    beside = np.diff(begun) - inside
    warm = slice(len(inside) // 4, None)
    print(f"\n| a step of {ranks} ranks | ms |\n|---|---|")
    print(f"| forward, backward, optimizer | {1e3 * statistics.median(inside[warm]):.2f} |")
    print(f"| all else | {1e3 * statistics.median(beside[warm]):.2f} |")


def finding(steps: int) -> None:
    print("\n| the place of a run over 1,000,000,000 rows, found again | ms |\n|---|---|")
    lengths = [BILLION // 4, 3 * BILLION // 4]
    for name, make in (
        ("random", lambda: RandomSampler(BILLION, seed=1)),
        ("mixed", lambda: DataMixingSampler(range(BILLION), lengths=lengths, weights=[2, 1], seed=1)),
    ):
        drawn = make()
        rows = iter(drawn)
        for _ in range(steps):
            next(rows)
        state, seconds = drawn.state_dict(), []
        for _ in range(TURNS):
            began = time.perf_counter()
            again = make()
            again.load_state_dict(state)
            found = next(iter(again))
            seconds.append(time.perf_counter() - began)
        assert found == next(rows)
        print(f"| {name} | {1e3 * statistics.median(seconds):.3f} |")


def main(arguments: list[str]) -> None:
    given = {"width": 512, "layers": 8, "steps": 200, "ranks": 2}
    given |= {key: int(value) for key, value in (argument.split("=", 1) for argument in arguments)}
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        saving(Path(name), width=given["width"], layers=given["layers"])
        stepping(Path(name), steps=given["steps"], ranks=given["ranks"])
    finding(given["steps"])


if __name__ == "__main__":
    main(sys.argv[1:])
