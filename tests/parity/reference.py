"""A training loop written by hand, one row at a time: what Burnish has to equal."""

import warnings
from pathlib import Path

import torch
import torch.nn.functional as F


def train(
    model_dir: Path,
    batches: list[list[tuple[list[int], list[int]]]],
    *,
    lr: float,
    weight_decay: float = 0.01,
    eps: float = 1e-6,
    max_grad_norm: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    adapter: Path | None = None,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final trained weights of AdamW on ``batches`` of (ids, mask) rows.

    All weights are trained, or those of the ``adapter`` in a folder of peft.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    if adapter:
        model = with_adapter(model, adapter)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in trained.values() if p.ndim >= 2]
    plain = [p for p in trained.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    losses, norms = [], []
    for rows in batches:
        num_targets = sum(sum(mask[1:]) for _, mask in rows)
        total = 0.0
        for ids, mask in rows:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            labels = torch.tensor([i if m else -100 for i, m in zip(ids, mask, strict=True)])
            logits, labels = logits[:-1][labels[1:] != -100], labels[1:][labels[1:] != -100]
            loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
            loss = (loss + z_loss * (torch.logsumexp(logits, -1) ** 2).sum()) / num_targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach().clone() for name, p in trained.items()}


def with_adapter(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """``model`` with the adapter of ``folder``, to be trained on, by peft itself."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in an older way
        return PeftModel.from_pretrained(model, folder, is_trainable=True)
