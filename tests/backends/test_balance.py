"""Experts are balanced over the tokens of a step, whatever its micro-batches and ranks make of the loss itself."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from burnish.backends.fsdp import shard
from burnish.backends.tensors import model_inputs
from burnish.models.loss import LossModel, Objective
from tests.backends.steps import batch_of, draw, opened
from tests.models.families import tiny
from tests.ranks import on_ranks
from tests.toys import save_tokenizer

ROWS, COEF = draw(5), 0.5
SETTINGS = {"num_steps": 10, "num_sources": 2, "learning_rate": 0.0, "weight_decay": 0.0, "max_grad_norm": None}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tiny("qwen3-moe").save_pretrained(folder)
    return save_tokenizer(folder)


def step(model_dir, coef, settings=(), ranks=1, **layout):
    """(loss, gradients) of a step of ``ROWS``; gradients are read as the optimizer would."""
    kept = {}
    with opened(model_dir, **SETTINGS, **dict(settings), objective=Objective(router_aux_loss_coef=coef)) as backend:

        def keep():
            for name, parameter in backend._parameters.items():
                grad = parameter.grad
                kept[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()

        backend._optimizer.step = keep
        result = backend.train_step(batch_of(ROWS, ranks=ranks, rank=backend.layout.data_rank, **layout))
    return result.loss, kept


def by_hand(batches):
    """Gradients of the mean cross-entropy and of the mean, by tokens, of the micro-batches' balancing losses."""
    model = tiny("qwen3-moe")
    plain = LossModel(model, num_sources=2)
    for batch in batches:
        for micro_batch in batch.micro_batches:
            inputs = model_inputs(micro_batch, device=torch.device("cpu"))
            (plain(**inputs)[0] / batch.num_targets).backward()
            if inputs["num_tokens"]:
                asked = {name: inputs[name] for name in ("input_ids", "position_ids", "segments")}
                routers = model.base_model(**asked, use_cache=False, output_router_logits=True).router_logits
                kept = tuple(logits[inputs["is_token"].flatten()] for logits in routers)
                share = inputs["num_tokens"] / batch.num_tokens
                (COEF * share * load_balancing_loss_func(kept, 4, 2)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-8, name


LAYOUTS = [{"micro_batch_size": 5}, {"micro_batch_size": 2}, {"layout": "padded"}, {"layout": "packed"}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}], ids=str)
def test_the_gradient_is_that_of_the_mean_over_tokens(model_dir, layout, settings):
    loss, found = step(model_dir, COEF, settings, **layout)
    assert_same(found, by_hand([batch_of(ROWS, **layout)]))
    assert loss == step(model_dir, 0.0, settings, **layout)[0], "what is logged is the cross-entropy alone"


def _on_a_rank(model_dir, layout):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "MIN_LAYER_PARAMETERS", 0)
        return step(model_dir, COEF, ranks=2, **layout)


@pytest.mark.parametrize("layout", [{"micro_batch_size": 1}, {"micro_batch_size": 5}], ids=str)
def test_two_ranks_take_the_mean_over_both(model_dir, layout):
    """One of which has a micro-batch of padding where each has one row."""
    expected = by_hand([batch_of(ROWS, ranks=2, rank=rank, **layout) for rank in range(2)])
    for _, found in on_ranks(2, _on_a_rank, model_dir, layout):
        assert_same(found, expected)
