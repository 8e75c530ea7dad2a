"""Experts are kept busy by the loss that transformers has for them."""

import numpy as np
import pytest
import torch
from transformers import GraniteMoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig

from burnish.backends.tensors import model_inputs
from burnish.data.batch import collate
from burnish.data.packing import Layout
from burnish.models.attention import NAMES, register
from burnish.models.balance import balancing_loss
from burnish.models.kernels import Kernel
from burnish.models.loss import LossModel, Objective
from tests.backends.steps import draw, example, summed_loss
from tests.models.families import SHAPE, build, tiny

CPU = torch.device("cpu")
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "qwen3": lambda: tiny("qwen3-moe"),
    "mixtral": lambda: build(MixtralConfig(**SHAPE, **EXPERTS)),
    "olmoe": lambda: build(OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2)),
    "granite": lambda: build(GraniteMoeConfig(**SHAPE, **EXPERTS)),
    "qwen2": lambda: build(
        Qwen2MoeConfig(
            **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
        )
    ),
}
ROWS = draw(3, count=4)


def inputs_of(rows, plan):
    sources = dict.fromkeys(range(len(rows)), 0)
    micro_batch = collate(dict(enumerate(rows)), plan, sources=sources, pad_id=2, layout=Layout())
    return model_inputs(micro_batch, device=CPU)


IN_A_ROW = inputs_of(ROWS, ((0, 1, 2, 3),))
PADDED = inputs_of(ROWS, ((0,), (1,), (2,), (3,)))
NUM_TOKENS, NUM_TARGETS = (
    sum(int(sum(part(e))) for e in ROWS) for part in (lambda e: [len(e.input_ids)], lambda e: e.loss_mask[1:])
)


def own_aux_loss(model):
    """What transformers itself says of the rows, padded and masked by itself."""
    longest = max(len(e.input_ids) for e in ROWS)
    ids, mask = torch.full((4, longest), 2), torch.zeros(4, longest, dtype=torch.int64)
    for number, one in enumerate(ROWS):
        ids[number, : len(one.input_ids)] = torch.tensor(one.input_ids.astype(np.int64))
        mask[number, : len(one.input_ids)] = 1
    model.set_attn_implementation("eager")
    loss = model(input_ids=ids, attention_mask=mask, labels=ids, output_router_logits=True).aux_loss
    model.set_attn_implementation(NAMES[Kernel.SDPA])
    return loss


def loss_and_gradients(model, inputs, coef, **scale):
    model.zero_grad()
    ours = LossModel(model, num_sources=1, objective=Objective(router_aux_loss_coef=coef)).train()
    loss, sums = ours(**inputs, **scale)
    loss.backward()
    return loss.detach(), sums, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("inputs", [IN_A_ROW, PADDED], ids=["in a row", "padded"])
@pytest.mark.parametrize("family", MIXTURES)
def test_the_loss_is_that_of_transformers_for_a_micro_batch(family, inputs):
    model = MIXTURES[family]()
    scale = {"targets_per_token": NUM_TARGETS / NUM_TOKENS}
    plain, plain_sums, without = loss_and_gradients(model, inputs, 0.0, **scale)
    loss, sums, grads = loss_and_gradients(model, inputs, 0.3, **scale)
    expected = own_aux_loss(model)
    assert (loss - plain).item() / NUM_TARGETS == pytest.approx(0.3 * expected.item(), rel=1e-4)
    assert torch.equal(sums, plain_sums), "what is logged is the cross-entropy alone"
    model.zero_grad()
    (0.3 * expected).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() > 1e-6:
            added = (grads[name] - without[name]) / NUM_TARGETS
            assert (added - parameter.grad).norm() < 1e-3 * parameter.grad.norm(), name


def test_a_coefficient_of_0_changes_nothing_to_the_bit():
    model = tiny("qwen3-moe")
    loss, _, grads = loss_and_gradients(model, IN_A_ROW, 0.0)
    bare = {name: value for name, value in IN_A_ROW.items() if name not in ("is_token", "num_tokens")}
    expected, _, others = loss_and_gradients(model, bare, 0.0)
    assert torch.equal(loss, expected)
    assert all(torch.equal(grads[name], other) for name, other in others.items())
    assert loss.item() == pytest.approx(summed_loss(_eager(model), ROWS).item(), rel=1e-5)


def _eager(model):
    model.set_attn_implementation("eager")
    return model


def test_the_gradient_of_a_router_is_that_of_finite_differences():
    """With the experts chosen held: to which a token goes does not move within the step."""
    model = tiny("qwen3-moe")
    _, _, grads = loss_and_gradients(model, IN_A_ROW, 2.0)
    name = "model.layers.0.mlp.gate.weight"
    weight, step = model.get_parameter(name), 1e-3
    direction = grads[name] / grads[name].norm()
    sides = []
    for sign in (1, -1):
        weight.data.add_(direction, alpha=sign * step)
        sides.append(loss_and_gradients(model, IN_A_ROW, 2.0)[0].item())
        weight.data.sub_(direction, alpha=sign * step)
    assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(grads[name].norm().item(), rel=2e-2)


def test_an_evaluation_and_a_micro_batch_of_padding_have_none():
    model = tiny("qwen3-moe")
    ours = LossModel(model, num_sources=1, objective=Objective(router_aux_loss_coef=1.0))
    assert ours.eval()(**PADDED)[0].item() == pytest.approx(loss_and_gradients(model, PADDED, 0.0)[0].item(), rel=1e-6)
    empty = inputs_of([example([5], [0])], ((),))
    loss, _, grads = loss_and_gradients(model, empty, 1.0)
    assert loss.item() == 0
    assert all(bool((grad == 0).all()) for grad in grads.values())


def test_experts_that_are_all_equally_busy_have_the_least():
    """As many as a token goes to; a router that sends all to the same two has more."""
    model = tiny("qwen3-moe")
    balance = balancing_loss(model)
    all_tokens = torch.ones(1, 8, dtype=torch.bool)
    turns = torch.full((8, 4), 0.0)
    for token in range(8):
        turns[token, [token % 4, (token + 1) % 4]] = 1.0
    alike = torch.tensor([3.0, 3.0, 0.0, 0.0]).repeat(8, 1)
    assert balance((turns,), all_tokens).item() == pytest.approx(2.0)
    assert balance((alike,), all_tokens).item() > 3.0
    half = torch.arange(8)[None] < 4
    assert balance((torch.cat([turns[:4], alike[:4]]),), half).item() == pytest.approx(2.0)


def test_a_model_without_experts_has_none():
    assert balancing_loss(tiny("qwen3")) is None
    assert balancing_loss(tiny("qwen3-moe")) is not None
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM, DogeConfig

        other = AutoModelForCausalLM.from_config(DogeConfig(**SHAPE, is_moe=True), attn_implementation=register())
    assert balancing_loss(other) is None, "its function takes other arguments"
