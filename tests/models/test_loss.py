import math

import pytest
import torch
from torch.nn import functional

from burnish.models import loss as loss_module
from burnish.models.attention import Segments
from burnish.models.loss import CROSS_ENTROPY, Head, LossModel, Objective, segment_loss
from tests.models.families import tiny

VOCABULARY, WIDTH, TARGETS = 50, 16, 23


def case(dtype=torch.float32, *, bias=False):
    torch.manual_seed(3)
    hidden = torch.randn(TARGETS, WIDTH, dtype=dtype, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.3).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY).to(dtype).requires_grad_() if bias else None
    ids, sources = torch.randint(VOCABULARY, (TARGETS,)), torch.randint(3, (TARGETS,))
    return hidden, weight, offset, ids, sources


OBJECTIVES = [CROSS_ENTROPY, Objective(label_smoothing=0.2), Objective(z_loss=0.03), Objective(0.1, 0.02)]


def reference(hidden, weight, bias, ids, head, objective=CROSS_ENTROPY):
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    bias = None if bias is None else bias.detach().double().requires_grad_()
    logits = functional.linear(hidden, weight, bias) * head.scale
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    losses = functional.cross_entropy(logits, ids, reduction="none", label_smoothing=objective.label_smoothing)
    losses = losses + objective.z_loss * torch.logsumexp(logits, -1) ** 2
    (losses.sum() / 7).backward()
    return losses.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad


def distance(a, b):
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("head", [Head(), Head(scale=0.25), Head(softcap=2.0), Head(scale=3.0, softcap=5.0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_loss_and_gradients_equal_full_logits(head, bias, chunk, objective, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", chunk * VOCABULARY)
    hidden, weight, offset, ids, sources = case(bias=bias)
    settings = {"target_ids": ids, "target_sources": sources, "num_sources": 3, "head": head, "objective": objective}
    total, sums = segment_loss(hidden, weight, offset, **settings)
    (total / 7).backward()
    losses, d_hidden, d_weight, d_bias = reference(hidden, weight, offset, ids, head, objective)
    assert total.item() == pytest.approx(float(losses.sum()), rel=1e-6)
    assert sums.tolist() == pytest.approx([float(losses[sources == s].sum()) for s in range(3)], rel=1e-6)
    assert distance(hidden.grad, d_hidden) < 1e-6
    assert distance(weight.grad, d_weight) < 1e-6
    if bias:
        assert distance(offset.grad, d_bias) < 1e-6


def test_low_precision_keeps_sums_in_float32(monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", VOCABULARY)
    hidden, weight, _, ids, sources = case(torch.bfloat16)
    total, _ = segment_loss(hidden, weight, None, target_ids=ids, target_sources=sources, num_sources=3, head=Head())
    (total / 7).backward()
    losses, d_hidden, d_weight, _ = reference(hidden, weight, None, ids, Head())
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(float(losses.sum()), rel=5e-3)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert distance(hidden.grad, d_hidden) < 1e-2
    assert distance(weight.grad, d_weight) < 1e-2


def test_no_targets_is_zero_with_a_graph():
    hidden, weight, _, ids, sources = case()
    total, sums = segment_loss(
        hidden[:0], weight, None, target_ids=ids[:0], target_sources=sources[:0], num_sources=3, head=Head()
    )
    total.backward()
    assert total.item() == 0
    assert sums.tolist() == [0, 0, 0]
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_without_gradients_the_loss_is_the_same():
    hidden, weight, _, ids, sources = case()
    settings = {"target_ids": ids, "target_sources": sources, "num_sources": 3, "head": Head()}
    with torch.no_grad():
        quiet, _ = segment_loss(hidden, weight, None, **settings)
    assert not quiet.requires_grad
    assert quiet.item() == segment_loss(hidden, weight, None, **settings)[0].item()


@pytest.mark.parametrize("micro_batches", [((4.0,), (1.0, 1.0, 1.0)), ((4.0, 1.0, 1.0, 1.0),)])
def test_sums_over_micro_batches_divide_by_all_targets(micro_batches):
    weight = torch.tensor([[0.0], [1.0]])
    total = 0.0
    for losses in micro_batches:
        # With logits (0, h) the loss of token 0 is log(1 + exp(h)).
        hidden = torch.tensor([[math.log(math.exp(value) - 1)] for value in losses])
        zeros = torch.zeros(len(losses), dtype=torch.int64)
        total += segment_loss(hidden, weight, None, target_ids=zeros, target_sources=zeros, num_sources=1, head=Head())[
            0
        ].item()
    assert total / 4 == pytest.approx(1.75, abs=1e-6)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "cohere", "granite"])
@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_a_model_is_trained_on_the_objective_and_evaluated_without_it(family, objective):
    ours, theirs = (tiny(family) for _ in range(2))
    ids = torch.randint(96, (1, 9), generator=torch.Generator().manual_seed(5))
    model = LossModel(ours, num_sources=1, objective=objective)
    inputs = {
        "position_ids": torch.arange(9)[None],
        "segments": Segments.whole(1, length=9),
        "target_positions": torch.arange(2, 8),
        "target_ids": ids[0, 3:],
        "target_sources": torch.zeros(6, dtype=torch.int64),
    }
    theirs.set_attn_implementation("eager")
    logits = theirs(input_ids=ids, use_cache=False).logits[0, 2:8].float()
    plain = functional.cross_entropy(logits, ids[0, 3:], reduction="sum")
    loss = functional.cross_entropy(logits, ids[0, 3:], reduction="sum", label_smoothing=objective.label_smoothing)
    (loss := loss + objective.z_loss * (torch.logsumexp(logits, -1) ** 2).sum()).backward()
    trained, _ = model.train()(ids, **inputs)
    trained.backward()
    assert trained.item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert distance(own.grad, other.grad) < 1e-4, name
    assert model.eval()(ids, **inputs)[0].item() == pytest.approx(plain.item(), rel=1e-5)
