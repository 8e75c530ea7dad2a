"""Several ranks and checkpoints: `python -m benchmarks.ranks [width=512] [layers=8] [steps=200] [ranks=2]`.

First the training thread's time in `save()`, beside a synchronous save of the same tensors by the same library
(`torch.distributed.checkpoint.save`), in turns, onto the disk of the temporary folder. Then what a step of a tiny model
takes on several ranks beside its forward, backward and optimizer (drawing and planning rows, the ranks' agreement,
metrics, their log). Then how long a run over a billion rows takes to find its place again. Seconds on the clock: the
middle of the turns.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_at_once

from burnish.assemble.run import build_run
from burnish.backends.base import StepResult
from burnish.backends.comm import joined
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.bench.rows import draw_lengths, write_rows
from burnish.config import SFTConfig
from burnish.data.batch import Batch
from burnish.data.packing import Layout
from burnish.data.samplers import DataMixingSampler, RandomSampler
from burnish.models.blank import write_blank

TURNS = 5
VOCABULARY = 8192
BILLION = 10**9

Step = Callable[[Batch], StepResult]


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
            t.numel() * t.element_size() for kind in backend._tensors(with_moments=True).values() for t in kind.values()
        )
        for turn in range(TURNS):
            began = time.perf_counter()
            save_at_once(
                backend._tensors(with_moments=True), storage_writer=FileSystemWriter(folder / f"at-once-{turn}")
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


def stepping(folder: Path, *, steps: int, ranks: int) -> None:
    write_model(folder / "tiny", width=32, layers=2)
    lengths = draw_lengths("lognormal", count=8 * steps, mean=24, cv=1.0, longest=128)
    write_rows(folder / "rows.arrow", lengths, vocabulary=VOCABULARY, target_share=0.5)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--no-python"]
    command = [*launcher, sys.executable, "-m", "benchmarks.ranks", f"as_rank={folder}", f"steps={steps}"]
    subprocess.run(command, check=True, capture_output=True)
    inside, beside = (1e3 * np.median(seconds) for seconds in json.loads((folder / "seconds.json").read_text()))
    print(f"\n| a step of {ranks} ranks | ms |\n|---|---|")
    print(f"| forward, backward, optimizer | {inside:.2f} |")
    print(f"| all else, waiting for the other ranks included | {beside:.2f} |")


def step_as_rank(folder: Path, *, steps: int) -> None:
    """Train over the same rows in turns; rank 0 writes the seconds of each step inside ``train_step`` and beside it."""
    config = SFTConfig(
        model={"path": str(folder / "tiny")},
        pretokenized_dataset_paths=[str(folder / "rows.arrow")],
        num_steps=steps,
        batch_size=8,
        max_length=128,
        use_sequence_packing=True,
        log_dir=str(folder / "runs"),
        cache_dir=str(folder / "cache"),
    )
    inside: list[float] = []
    beside: list[float] = []
    with joined() as ranks:
        for _ in range(TURNS):
            clock: list[float] = []
            with build_run(config, ranks=ranks, interrupted=lambda: False) as trainer:
                step = trainer._backend.train_step

                def clocked(batch: Batch, *, step: Step = step, clock: list[float] = clock) -> StepResult:
                    clock.append(time.perf_counter())
                    result = step(batch)
                    clock.append(time.perf_counter())
                    return result

                trainer._backend.train_step = clocked
                trainer.train()
            warm = np.diff(clock)[steps // 4 * 2 :]
            inside += warm[::2].tolist()
            beside += warm[1::2].tolist()
        if ranks.rank == 0:
            (folder / "seconds.json").write_text(json.dumps([inside, beside]))


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
    words = dict(argument.split("=", 1) for argument in arguments)
    folder = words.pop("as_rank", None)
    given |= {key: int(value) for key, value in words.items()}
    if folder:
        step_as_rank(Path(folder), steps=given["steps"])
        return
    with tempfile.TemporaryDirectory(prefix="burnish-bench-") as name:
        saving(Path(name), width=given["width"], layers=given["layers"])
        stepping(Path(name), steps=given["steps"], ranks=given["ranks"])
    finding(given["steps"])


if __name__ == "__main__":
    main(sys.argv[1:])
