"""What tests of the Megatron backend run on ranks, each a function of its own; and the faults that must be noticed.

Megatron is imported in those processes only: what its CPU stand-in changes stays changed.
"""

import os
from contextlib import ExitStack, closing, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from burnish.backends.comm import joined
from burnish.backends.megatron.layout import layout_of
from burnish.backends.megatron.quiet import keep_quiet
from burnish.backends.megatron.sizes import Sizes
from tests.backends.steps import batch_of, draw, example, grouped, summed_loss
from tests.ranks import on_ranks

ALL = os.environ.get("BURNISH_MEGATRON") == "all"
"""Whether all cases run, as ``make test-megatron`` does."""
LR = 1e-3
PAD = 2
"""The token that pads, and ends a turn: its own embedding is not trained by transformers."""


def step_rows(number, *, vocabulary=96):
    """The examples of a step, one of which has a token that is padding elsewhere."""
    return [*draw(number, count=5, vocabulary=vocabulary), example([7, 9, PAD, 11, PAD], [0, 1, 1, 1, 1])]


def on_megatron(number, function, *arguments):
    """What ``function(*arguments)`` returns on each of ``number`` ranks."""
    return on_ranks(number, function, *arguments, pool="megatron")


@contextmanager
def opened(model_dir, *, sizes=Sizes(), **settings):  # noqa: B008
    """A Megatron backend of the ranks that the environment names."""
    from burnish.backends.megatron.cpu import install

    keep_quiet()
    install()
    from burnish.backends.megatron.backend import MegatronBackend

    defaults = {"num_steps": 10, "num_sources": 2, "learning_rate": LR, "eps": 1e-6, "schedule": "constant"}
    settings = grouped({**defaults, **settings})
    del settings["sharding"]
    with joined("cpu") as ranks:
        place = layout_of(sizes, rank=ranks.rank, world_size=ranks.world_size)
        arguments = {"ranks": ranks, "layout": place, "model_path": str(model_dir), "sizes": sizes}
        with closing(MegatronBackend(**arguments, **settings)) as backend:
            yield backend


def train(backend, numbers, layout, *, micro_batch_size=2):
    """(losses, norms) of the steps of these numbers."""
    losses, norms = [], []
    for number in numbers:
        arguments = {"step": number + 1, "layout": layout, "place": backend.layout}
        result = backend.train_step(batch_of(step_rows(number), micro_batch_size=micro_batch_size, **arguments))
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert not result.skipped
    return losses, norms


def trained(model_dir, sizes, layout, num_steps, out, fault, settings):
    """{losses, norms, evaluated, gradients} of this rank; the export of the trained model lies in ``out``."""
    with ExitStack() as stack:
        if fault in BEFORE:
            stack.enter_context(BEFORE[fault]())
        backend = stack.enter_context(opened(model_dir, sizes=sizes, **settings))
        if fault in AFTER:
            stack.enter_context(AFTER[fault](backend) or nullcontext())
        gradients = first_gradients(backend, layout)
        losses, norms = train(backend, range(num_steps), layout)
        evaluated = backend.eval_loss(batch_of(step_rows(0), layout=layout, place=backend.layout))
        if out:
            backend.export(Path(out))
        return {"losses": losses, "norms": norms, "evaluated": evaluated, "gradients": gradients}


def first_gradients(backend, layout):
    """Those of the first step by their names in Hugging Face, of this rank's stage; none where copies share the sums."""
    from burnish.backends.megatron.weights import hf_named

    if backend.layout.data_size * backend._sizes.context * backend._sizes.expert > 1:
        return {}
    for model in backend._wrapped:
        model.train()
        model.zero_grad_buffer()
    backend._run(batch_of(step_rows(0), layout=layout, place=backend.layout), objective=backend._objective)
    settings = {"hf_config": backend._hf_config, "sizes": backend._sizes}
    named = hf_named(backend._models, tensor_of=lambda parameter: parameter.main_grad, **settings)
    gradients = {name: gradient.clone() for name, gradient in named}
    backend._optimizer.zero_grad()
    return gradients


LIMITS = {"loss": 1e-5, "norm": 1e-5, "evaluation": 1e-5, "gradient": 1e-5, "weight": 1e-4}
"""The greatest distances allowed, each relative; of gradients and weights by the norm of a tensor."""


def distances(results, reference, gradients):
    """{kind: the greatest relative distance from the reference loop}, of all ranks."""
    losses, norms, evaluated = reference
    found = {"loss": [], "norm": [], "evaluation": [], "gradient": []}
    for result in results:
        num_steps = len(result["losses"])
        found["loss"] += apart(result["losses"], losses[:num_steps])
        found["norm"] += apart(result["norms"], norms[:num_steps])
        if num_steps == len(losses):
            found["evaluation"] += apart(result["evaluated"][:1], [evaluated])
        for name, gradient in result["gradients"].items():
            if ".experts." not in name:  # transformers holds those of a layer as one
                expected = gradients[name]
                found["gradient"].append(float((gradient - expected).norm() / expected.norm().clamp(min=1e-6)))
    return {kind: float(np.max(values)) for kind, values in found.items() if values}


def apart(found, expected):
    return np.abs(np.array(found) / expected - 1).tolist()


def too_far(distances):
    """Those above their limit; what is not a number is too far."""
    return {kind: value for kind, value in distances.items() if not value <= LIMITS[kind]}


def run(model_dir, sizes, *, ranks, layout="shared", num_steps=3, out=None, fault="", **settings):
    """:func:`trained` on all ranks."""
    return on_megatron(ranks, trained, model_dir, sizes, layout, num_steps, out, fault, settings)


def gradients_of(model, rows):
    """Those of the reference loop's first step, by name."""
    loss = summed_loss(model, rows) / sum(int(one.loss_mask[1:].sum()) for one in rows)
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _norms_unmarked(backend):
    for model in backend._models:
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.sequence_parallel = False


def _loss_per_micro_batch(backend):
    backend._models[0].config.calculate_per_token_loss = False


def _bounds_missing_on_a_middle_stage(backend):
    from burnish.backends.megatron import thd

    del backend
    if torch.distributed.get_rank() != 1:
        return None
    whole = thd.StageInputs.call.fget
    return patch.object(thd.StageInputs, "call", property(lambda own: {**whole(own), "packed_seq_params": None}))


def _queries_not_interleaved():
    from burnish.backends.megatron import weights

    def runs(prefix, kind, *, start, stop, hf_config):
        del start, stop
        width = hf_config.head_dim
        sizes = {"q": hf_config.num_attention_heads * width, "k": hf_config.num_key_value_heads * width}
        return [weights.Run(f"{prefix}{m}_proj.{kind}", 0, 0, sizes.get(m, sizes["k"])) for m in "qkv"]

    return patch.object(weights, "_head_runs", runs)


def _no_segments():
    from burnish.backends.megatron import thd

    return patch.object(thd, "sequence_bounds", lambda ids, **_: np.array([0, ids.size]))


def _contiguous_parts():
    from burnish.backends.megatron import thd

    def held(bounds, *, parts, part):
        spans = pairwise(bounds)
        return np.concatenate([np.array_split(np.arange(a, b), parts)[part] for a, b in spans])

    return patch.object(thd, "held_tokens", held)


BEFORE = {
    "queries not interleaved": _queries_not_interleaved,
    "no segments": _no_segments,
    "contiguous parts of a row": _contiguous_parts,
}
AFTER = {
    "norms not marked": _norms_unmarked,
    "loss per micro-batch": _loss_per_micro_batch,
    "bounds missing on a middle stage": _bounds_missing_on_a_middle_stage,
}
