"""Batches for backends, and the loop they are compared with: one row at a time, plain transformers and torch."""

from contextlib import closing, contextmanager
from dataclasses import fields

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from burnish.backends.comm import joined
from burnish.backends.fsdp.backend import FsdpBackend
from burnish.backends.fsdp.shard import Sharding
from burnish.backends.optimizer import Recipe
from burnish.data.batch import Batch, collate
from burnish.data.example import Example
from burnish.data.packing import Layout, plan_bins, plan_micro_batches


@contextmanager
def opened(model_dir, *, device="cpu", share=1, **settings):
    """A backend of the ranks that the environment names, ``share`` of which hold a part each of the same rows."""
    with joined(device) as ranks:
        place = place_of(ranks.rank, ranks.world_size, share=share)
        with closing(FsdpBackend(ranks=ranks, layout=place, model_path=str(model_dir), **grouped(settings))) as backend:
            yield backend


def grouped(settings):
    """``settings`` with those of the recipe and of the sharding put together, as a backend takes them."""
    rest = dict(settings)
    for name, kind in (("recipe", Recipe), ("sharding", Sharding)):
        own = {field.name: rest.pop(field.name) for field in fields(kind) if field.name in rest}
        rest[name] = kind(**own)
    return rest


def place_of(rank, world_size, *, share=1):
    return Layout(data_rank=rank // share, data_size=world_size // share, row_multiple=share)


def example(ids, mask):
    return Example(np.array(ids, np.int32), np.array(mask, np.uint8))


def draw(seed, *, count=5, vocabulary=96):
    """Examples of 3 to 12 tokens; the first of them has its first token marked, which must not count."""
    random = np.random.default_rng(seed)
    sizes = random.integers(3, 13, count)
    rows = [example(random.integers(3, vocabulary, n), random.integers(0, 2, n)) for n in sizes]
    rows[0].loss_mask[:] = 1
    return rows


def batch_of(examples, *, step=1, layout="shared", micro_batch_size=2, ranks=1, rank=0, place=None, capacity=20):
    """One step: ``shared`` rows, ``padded`` rows, or ``packed`` bins of ``capacity`` tokens; the part of it at ``place``."""
    lengths = [len(e.input_ids) for e in examples]
    place = place or place_of(rank, ranks)
    if layout == "packed":
        plan = plan_bins(lengths, capacity=capacity, layout=place)[place.data_rank]
    else:
        plan = plan_micro_batches(
            lengths, micro_batch_size=micro_batch_size, share_row=layout == "shared", layout=place
        )[place.data_rank]
    sources = {position: position % 2 for position in range(len(examples))}
    rows = dict(enumerate(examples))
    return Batch(
        micro_batches=tuple(collate(rows, part, sources=sources, pad_id=2, layout=place) for part in plan),
        num_targets=sum(int(e.loss_mask[1:].sum()) for e in examples),
        num_tokens=sum(lengths),
        row_numbers=tuple(range(len(examples))),
        step=step,
        ends_epoch=False,
        cursor={},
    )


def summed_loss(model, examples):
    """Cross-entropy of the targets, summed, one example at a time."""
    total = 0.0
    for one in examples:
        ids = torch.tensor(one.input_ids.astype(np.int64))
        labels = torch.where(torch.tensor(one.loss_mask[1:].astype(bool)), ids[1:], -100)
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        total = total + functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return total


def reference_run(model_dir, steps, *, lr, eps=1e-6, weight_decay=0.01, max_grad_norm=1.0):
    """(losses, gradient norms, the trained model) of a hand-written loop over lists of examples."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=eps)
    losses, norms = [], []
    for examples in steps:
        loss = summed_loss(model, examples) / sum(int(e.loss_mask[1:].sum()) for e in examples)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model
