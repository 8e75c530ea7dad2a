"""The other side of the comparison: TRL's SFTTrainer on the rows and the model that a RUN.yaml of ours names.

Run as a program, ``python -m burnish.bench.trl RUN.yaml OUT.json WARMUP``, in a process of its own.
"""

import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from burnish.assemble.data import build_stream, open_train
from burnish.assemble.model import require_valid
from burnish.bench.watch import Measured, Memory, clocks
from burnish.config import SFTConfig, load_config
from burnish.data.packing import Layout
from burnish.data.stream import BatchStream, Draw
from burnish.models.flops import peak_flops, step_flops
from burnish.models.load import ModelCard


def main(run: str, out: str, warmup: str) -> None:
    """Train what ``run`` says, and write a :class:`Measured` of all steps after ``warmup`` to ``out``."""
    config = load_config(Path(run))
    card = require_valid(config)
    stream = build_stream(config, card, open_train(config, card), layout=Layout())
    draws = list(islice(stream.draws(), config.num_steps))
    clock, trainer = _trainer(config, card, stream, draws=draws)
    trainer.train()
    peak, above = clock.memory.gib()
    seconds, cpu_seconds = np.subtract(clock.ends[-1], clock.ends[int(warmup) - 1]).tolist()
    tokens = sum(clock.tokens[int(warmup) :])
    most = peak_flops(torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    Measured(
        steps=len(clock.ends) - int(warmup),
        tokens=tokens,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        mfu=_flops(card, stream, draws=draws) * tokens / sum(clock.tokens) / seconds / most if most else None,
        data_wait=None,
        loss=clock.losses[-1],
        memory_peak_gib=peak,
        memory_above_start_gib=above,
    ).write(Path(out))


def _flops(card: ModelCard, stream: BatchStream, *, draws: list[Draw]) -> float:
    """Of all drawn rows."""
    store, rows = stream.builder.store, [row for draw in draws for row in draw.rows]
    return step_flops(card, lengths=store.lengths[rows].tolist(), num_targets=int(store.target_counts[rows].sum()))


def _trainer(config: SFTConfig, card: ModelCard, stream: BatchStream, *, draws: list[Draw]) -> tuple[Any, Any]:
    """(the clock of the run, TRL's trainer) for as many steps as were drawn, of about as many tokens."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig as TheirConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = [stream.builder.store[row] for draw in draws for row in draw.rows]
    data = Dataset.from_dict(
        {
            "input_ids": [row.input_ids.tolist() for row in rows],
            "labels": [np.where(row.loss_mask, row.input_ids.astype(np.int64), -100).tolist() for row in rows],
        }
    )
    packing = config.use_sequence_packing
    capacity = config.max_tokens_per_microbatch or config.max_length
    assert capacity is not None, "the bench gives one"
    full = sum(len(row.input_ids) for row in rows) / len(draws) / capacity
    alone = len(rows) / len(draws) / config.micro_train_batch_size_per_gpu
    settings = TheirConfig(
        output_dir=str(Path(config.log_dir) / "trl"),
        max_steps=len(draws),
        per_device_train_batch_size=1 if packing else config.micro_train_batch_size_per_gpu,
        gradient_accumulation_steps=max(1, round(full if packing else alone)),
        packing=packing,
        padding_free=config.remove_microbatch_padding,
        max_length=capacity,
        bf16=config.model.dtype == "bfloat16" or (config.model.dtype is None and torch.cuda.is_available()),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=config.fsdp_config.activation_checkpointing,
        learning_rate=config.optimizer_config.lr,
        adam_beta2=config.optimizer_config.adam_betas[1],
        weight_decay=config.optimizer_config.weight_decay,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataset_num_proc=None,
    )
    clock = _clock()
    model: Any = card.path
    return clock, _counting(SFTTrainer, clock)(model=model, args=settings, train_dataset=data, callbacks=[clock])


def _clock() -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Notes when each step was logged, its loss and its tokens."""

        def __init__(self) -> None:
            self.ends: list[tuple[float, float]] = []
            self.tokens: list[int] = []
            self.losses: list[float] = []

        def on_train_begin(self, *event: Any, **state: Any) -> None:
            self.memory = Memory()

        def on_step_begin(self, *event: Any, **state: Any) -> None:
            self.tokens.append(0)

        def on_log(self, *event: Any, **state: Any) -> None:
            if "loss" in state["logs"]:
                self.losses.append(float(state["logs"]["loss"]))
                self.ends.append(clocks())

    return Clock()


def _counting(trainer: Any, clock: Any) -> Any:
    class Counting(trainer):  # type: ignore[misc]
        """Counts the tokens it trains on, padding not counted."""

        def compute_loss(self, model: Any, inputs: Any, *others: Any, **settings: Any) -> Any:
            mask = inputs.get("attention_mask")
            clock.tokens[-1] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().compute_loss(model, inputs, *others, **settings)

    return Counting


if __name__ == "__main__":
    main(*sys.argv[1:])
