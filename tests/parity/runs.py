"""Runs of Burnish that a parity test compares: the rows, the call, and what is read back."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from burnish import SFTConfig, SFTTrainer
from burnish.assemble.run import build_run
from burnish.backends.comm import joined
from burnish.train.callbacks import Callback
from tests.ranks import on_ranks
from tests.toys import chat, row, write_jsonl

BATCH_SIZE = 4
LR = 3e-3
WORDS = ("alpha", "be", "gamma ray", "d", "epsilon", "zeta!", "eta", "th", "iota 9", "kappa", "la", "mu", "nu nu")
CHATS = [chat(f"say {word}", word, f"and {word} again", f"{word}, {word}") for word in WORDS]


def tokenized(messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and mask of a conversation in template T1 and tokenizer TK, from their definition."""
    from tests.toys import SPECIALS

    characters = ["\n", *(chr(c) for c in range(32, 127))]
    number = {c: i for i, c in enumerate([*SPECIALS, *characters])}
    ids, mask = [], []
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    for i, message in enumerate(messages):
        header = ["<|im_start|>", *message["role"], "\n"]
        own = [*message["content"], "<|im_end|>"]
        ids += [number[c] for c in [*header, *own, "\n"]]
        mask += [0] * len(header) + [int(i == last)] * len(own) + [0]
    return ids, mask


ROWS = [tokenized(c["messages"]) for c in CHATS]


def batches_of_tokens(num_steps: int, tokens: int) -> list[list[tuple[list[int], list[int]]]]:
    """The rows of each step of at most so many tokens: as stored, a step ends before the row that would pass it."""
    epoch: list[list[tuple[list[int], list[int]]]] = []
    for made in ROWS:
        if not epoch or sum(len(ids) for ids, _ in [*epoch[-1], made]) > tokens:
            epoch.append([])
        epoch[-1].append(made)
    return [epoch[step % len(epoch)] for step in range(num_steps)]


def batches(num_steps: int) -> list[list[tuple[list[int], list[int]]]]:
    """The rows of each step: as stored, the last batch of an epoch short."""
    epoch = [ROWS[i : i + BATCH_SIZE] for i in range(0, len(ROWS), BATCH_SIZE)]
    return [epoch[step % len(epoch)] for step in range(num_steps)]


def raw_data(folder: Path) -> dict[str, Any]:
    return {"train_datasets": [str(write_jsonl(folder / "chats.jsonl", CHATS))]}


def store_data(folder: Path) -> dict[str, Any]:
    file = write_jsonl(folder / "store.jsonl", [row(ids, mask) for ids, mask in ROWS])
    return {"pretokenized_dataset_paths": [str(file)]}


def config_of(folder: Path, *, model_dir: Path, num_steps: int, **keys: Any) -> SFTConfig:
    base = {
        "model": {"path": str(model_dir)},
        **({} if "batch_tokens" in keys else {"batch_size": BATCH_SIZE}),
        "sampler": "sequential",
        "max_length": 128,
        "num_steps": num_steps,
        "num_workers": 0,
        "optimizer_config": {"lr": LR, "eps": 1e-6},
        "log_dir": str(folder / "runs"),
        "ckpt_path": str(folder / "ckpt"),
        "hf_save_interval": 1000,
        "cache_dir": str(folder / "cache"),
    }
    return SFTConfig(**(base | keys))


def run(folder: Path, *, model_dir: Path, num_steps: int, **keys: Any) -> dict[str, Any]:
    """Train; {losses, norms, weights} of the run, read from what it wrote."""
    config = config_of(folder, model_dir=model_dir, num_steps=num_steps, **keys)
    SFTTrainer(config).train()
    return read_back(folder, num_steps=num_steps)


def run_on(number: int, folder: Path, *, model_dir: Path, num_steps: int, **keys: Any) -> dict[str, Any]:
    """The same on so many ranks; {rows} of each step, as every rank drew them, too."""
    rows = on_ranks(number, train_as_rank, folder, model_dir, num_steps, keys)
    assert rows == rows[:1] * number
    return {**read_back(folder, num_steps=num_steps), "rows": rows[0]}


def train_as_rank(folder: Path, model_dir: Path, num_steps: int, keys: dict[str, Any]) -> list[tuple[int, ...]]:
    """Train as one of the ranks; the rows of the steps taken."""
    ROWS_DRAWN.clear()
    callbacks = ["tests.parity.runs.Notes", *keys.pop("callbacks", [])]
    config = config_of(folder, model_dir=model_dir, num_steps=num_steps, callbacks=callbacks, **keys)
    with joined("cpu") as ranks, build_run(config, ranks=ranks, interrupted=lambda: False) as trainer:
        trainer.train()
    return list(ROWS_DRAWN)


ROWS_DRAWN: list[tuple[int, ...]] = []


class Notes(Callback):
    """Keeps the rows of each step."""

    def on_step_end(self, progress, requests, *, batch, result):
        ROWS_DRAWN.append(batch.row_numbers)


def read_back(folder: Path, *, num_steps: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines if line["step"]}
    weights = load_file(folder / "ckpt" / "hf_exports" / f"global_step_{num_steps}" / "model.safetensors")
    return {
        "losses": [by_step[step]["train/loss"] for step in range(1, num_steps + 1)],
        "norms": [by_step[step]["train/grad_norm"] for step in range(1, num_steps + 1)],
        "weights": weights,
    }


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses and gradient norms to 1e-5 relative, each weight tensor to 1e-4 relative."""
    for key in ("losses", "norms"):
        torch.testing.assert_close(torch.tensor(got[key]), torch.tensor(expected[key]), rtol=1e-5, atol=0)
    assert got["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        difference = (got["weights"][name] - weight).norm() / weight.norm()
        assert difference <= 1e-4, f"{name}: {difference:.1e}"
