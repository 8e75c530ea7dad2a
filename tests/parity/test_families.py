"""Examples that share a row have the logits and the gradients that they have alone, in every family."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from burnish.models.attention import NAMES, Segments
from burnish.models.kernels import Kernel
from tests.models.families import FAMILIES, tiny

EXAMPLES = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16], [5, 6, 7, 20, 21, 22, 23, 24, 25]]


def exact(family: str):
    """In float64, but for experts, whose product torch has in float32 at most."""
    model = tiny(family)
    return model if "moe" in family else model.double()


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def loss_of(logits, labels) -> torch.Tensor:
    return cross_entropy(logits, torch.tensor(labels), ignore_index=-100, reduction="sum")


def packed(model, *, segment_of=lambda number: number + 1):
    """Logits of the examples in one row, and the gradients of the sum of their losses."""
    ids = [token for example in EXAMPLES for token in example]
    positions = [place for example in EXAMPLES for place in range(len(example))]
    labels = [label for example in EXAMPLES for label in (*example[1:], -100)]
    segments = [segment_of(number) for number, example in enumerate(EXAMPLES) for _ in example]
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "use_cache": False}
    logits = model(**inputs, segments=Segments.of(np.array([segments], np.int32))).logits[0]
    loss_of(logits, labels).backward()
    return logits.detach(), gradients(model)


def alone(model):
    """The same of each by itself, through transformers' own attention."""
    model.set_attn_implementation("eager")
    logits = []
    for example in EXAMPLES:
        logits.append(model(input_ids=torch.tensor([example]), use_cache=False).logits[0])
        loss_of(logits[-1], [*example[1:], -100]).backward()
    model.set_attn_implementation(NAMES[Kernel.SDPA])
    return torch.cat(logits).detach(), gradients(model)


def differs(found, wanted) -> float:
    """The largest difference, by the largest value."""
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients(family):
    model = exact(family)
    (logits, grads), (wanted, wanted_grads) = packed(model), alone(model)
    assert differs({"": logits}, {"": wanted}) < 1e-5
    assert set(grads) == set(wanted_grads)
    assert differs(grads, wanted_grads) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_planted_leak_is_seen(family):
    model = exact(family)
    (logits, grads), (wanted, wanted_grads) = packed(model, segment_of=lambda number: 1), alone(model)
    assert differs({"": logits}, {"": wanted}) > 1e-3
    assert differs(grads, wanted_grads) > 1e-3
