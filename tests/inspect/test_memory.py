"""The estimate of memory is what the backends really hold, as far as a CPU can tell: no bfloat16 on Megatron, no GPU."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from burnish.assemble.model import lora_settings
from burnish.backends.fsdp import shard
from burnish.backends.megatron.sizes import Sizes
from burnish.config import load_config
from burnish.inspect.memory import Load, estimate_memory
from burnish.models.attention import Segments, register
from burnish.models.load import attention_of, read_card
from burnish.models.loss import LossModel
from tests.backends import megatron_runs
from tests.backends.steps import batch_of, draw, opened
from tests.models.families import FAMILIES, SHAPE
from tests.ranks import on_ranks
from tests.toys import save_model, save_tokenizer

VOCABULARY = 97
KEYS = {
    "fsdp": [],
    "lora": ["model.lora.rank=3"],
    "frozen dtype": ["model.lora.rank=3", "model.dtype=bfloat16"],
    "offload": ["fsdp_config.cpu_offload=true"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Rows of its embedding do not divide by two."""
    return save_model(tmp_path_factory.mktemp("model"), vocabulary=VOCABULARY)


def estimated(folder, words, *, world=1, **load):
    config = load_config(None, [f"model.path={folder}", *words])
    load = Load(**({"tokens": 40, "targets": 20} | load))
    return estimate_memory(config, read_card(str(folder)), world=world, load=load, on_gpu=False)


def local_bytes(tensors):
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.nbytes for t in local)


def held_by_fsdp(folder, words):
    """Bytes of (weights, gradients, optimizer) of this rank at the end of a step."""
    config = load_config(None, [f"model.path={folder}", *words])
    settings = {"num_steps": 3, "num_sources": 2, "lora": lora_settings(config), "dtype": config.model.dtype}
    with opened(folder, cpu_offload=config.fsdp_config.cpu_offload, **settings) as backend:
        gradients = []

        def keep_gradients():
            gradients.extend(p.grad for p in backend._parameters.values() if p.grad is not None)

        with patch.object(backend._optimizer, "zero_grad", keep_gradients):
            backend.train_step(batch_of(draw(0), place=backend.layout, micro_batch_size=1))
        state = [t for own in backend._optimizer.state.values() for t in own.values()]
        return local_bytes(backend._parameters.values()), local_bytes(gradients), local_bytes(state)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp_holds_what_is_estimated(folder, name, ranks):
    weights, gradients, optimizer = on_ranks(ranks, held_by_fsdp, folder, KEYS[name])[0]
    estimate = estimated(folder, KEYS[name], world=ranks)
    assert min(weights, gradients, optimizer) > 0
    if name == "offload":
        assert estimate.host == weights + gradients + optimizer
        assert (estimate.weights, estimate.gradients, estimate.optimizer) == (0, 0, 0)
    else:
        assert (estimate.weights, estimate.gradients, estimate.optimizer) == (weights, gradients, optimizer)


def whole_between(folder):
    """Bytes of gradients between two micro-batches, and of gathered weights in the first one's backward."""
    with patch.object(shard, "MIN_LAYER_PARAMETERS", 0), opened(folder, num_steps=3, num_sources=2) as backend:
        backend._model.train()
        backend._sharded.set_requires_gradient_sync(False)
        inputs = next(iter(backend._inputs(batch_of(draw(0), place=backend.layout, micro_batch_size=1))))
        backend._model(**inputs)[0].backward()
        groups = [m._get_fsdp_state()._fsdp_param_group for m in backend._model.modules() if isinstance(m, FSDPModule)]
        kept = [p for group in groups if group for p in group.fsdp_params]
        return sum(
            (
                p.unsharded_accumulated_grad if p.unsharded_accumulated_grad is not None else p.unsharded_param.grad
            ).nbytes
            for p in kept
        )


def test_gradients_are_whole_between_micro_batches(folder):
    whole = on_ranks(2, whole_between, folder)[0]
    assert estimated(folder, [], world=2, micro_batches=2).gradients == whole
    assert estimated(folder, [], world=2, micro_batches=1).gradients < whole


def test_gathered_layers(folder):
    kept = ["fsdp_config.reshard_after_forward=false"]
    with patch.object(shard, "MIN_LAYER_PARAMETERS", 0):
        two, all_layers = (estimated(folder, words, world=2).gathered for words in ([], kept))
    assert two == all_layers, "there are two layers"
    whole = estimated(folder, []).weights
    assert whole < two <= 3 * whole


def held_by_megatron(folder, sizes):
    with megatron_runs.opened(folder, sizes=sizes) as backend:
        weights = sum(p.nbytes for model in backend._models for p in model.parameters())
        gradients = sum(p.main_grad.nbytes for model in backend._models for p in model.parameters())
        moments = [t for part in backend._optimizer.parts for s in part.optimizer.state.values() for t in s.values()]
        return weights, gradients, sum(t.nbytes for t in moments if t.ndim)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(), []),
        (Sizes(tensor=2), ["megatron_config.tensor_model_parallel_size=2"]),
        (Sizes(pipeline=2), ["megatron_config.pipeline_model_parallel_size=2"]),
        (Sizes(context=2), ["megatron_config.context_parallel_size=2"]),
    ],
    ids=["copies", "tensor", "pipeline", "context"],
)
def test_megatron_holds_what_is_estimated(model_dir, sizes, words):
    """Of the rank with most; copies divide the moments among them where a buffer's middle is, not to the byte."""
    found = megatron_runs.on_megatron(2, held_by_megatron, model_dir, sizes)
    estimate = estimated(model_dir, ["strategy=megatron", "megatron_config.cpu=true", *words], world=2)
    weights, gradients, optimizer = map(max, zip(*found, strict=True))
    assert (estimate.weights, estimate.gradients) == (weights, gradients)
    assert estimate.optimizer == pytest.approx(optimizer, rel=0.002)


def saved_bytes(family, *, dtype, tokens):
    """Bytes kept for the backward pass, parameters not counted."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    # A CPU keeps the scores of attention that is capped; flex attention on a GPU, none.
    config.attn_logit_softcapping = None
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_of(config, register()))
    loss = LossModel(model.train(), num_sources=1)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.randint(3, SHAPE["vocab_size"], (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss(
            ids,
            position_ids=torch.arange(tokens)[None],
            segments=Segments.of(np.ones((1, tokens), np.int32), None),
            target_positions=torch.arange(tokens - 1),
            target_ids=ids[0, 1:],
            target_sources=torch.zeros(tokens - 1, dtype=torch.int64),
        )
        return sum(storage.nbytes() for at, storage in kept.items() if at not in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_within_a_quarter(tmp_path, family, dtype):
    FAMILIES[family]().save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").touch()
    measured = saved_bytes(family, dtype=getattr(torch, dtype), tokens=100)
    estimate = estimated(tmp_path, [f"model.dtype={dtype}"], tokens=100, targets=99).activations
    assert measured / 1.25 < estimate < measured * 1.25


def test_activations_fall_with_recomputation_and_with_ranks_that_share_rows(folder):
    whole = estimated(folder, []).activations
    shared = estimated(folder, ["sequence_parallel_size=2", "placement.num_gpus_per_node=2"], world=2).activations
    again = estimated(folder, ["fsdp_config.activation_checkpointing=true"]).activations
    assert shared == pytest.approx(whole / 2, abs=1)
    assert whole / 2 < again < whole, "one of two layers, and the inputs of both"


def test_logits_are_never_whole(folder):
    few, many, more = (estimated(folder, [], targets=n).logits for n in (10, 2**24, 2**25))
    assert few < many < more
    assert more - many == pytest.approx(2 * 4 * 2**24 * 32), "hidden states of the targets and their gradients alone"
