"""Rows with images on Megatron Core equal the hand-written loop, however the model is cut; and a planted fault does not.

A few cuts always; all of them with BURNISH_MEGATRON=all (``make test-megatron``).
"""

import json
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from burnish.assemble.model import model_problems
from burnish.backends.megatron.sizes import Sizes
from burnish.config import load_config
from burnish.models.load import read_card
from tests.backends.megatron_runs import ALL, LIMITS, LR, on_megatron, opened, too_far
from tests.backends.steps import batch_of
from tests.vision_models import reference_run, save_vision_model, summed_loss, vision_rows

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NUM_STEPS = 3
TP2, PP2, VP2 = {"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}
ALWAYS = {
    "qwen2_vl 1 packed": ("qwen2_vl", False, 1, {}, "packed"),
    "qwen2_5_vl 1 padded": ("qwen2_5_vl", True, 1, {}, "padded"),
    "qwen2_5_vl TP2 packed": ("qwen2_5_vl", False, 2, TP2, "packed"),
    "qwen2_5_vl DP2": ("qwen2_5_vl", True, 2, {}, "shared"),
    "qwen3_vl PP2 packed": ("qwen3_vl", False, 2, PP2, "packed"),
}
CUTS = {
    "1 padded": (1, {}, "padded"),
    "1 packed": (1, {}, "packed"),
    "TP2": (2, TP2, "shared"),
    "TP2 packed": (2, TP2, "packed"),
    "PP2": (2, PP2, "shared"),
    "PP2 packed": (2, PP2, "packed"),
    "VP2 packed": (2, VP2, "packed"),
    "DP2": (2, {}, "shared"),
    "DP2 packed": (2, {}, "packed"),
    "TP2 x PP2 packed": (4, {**TP2, **PP2}, "packed"),
    "PP2 x DP2 packed": (4, PP2, "packed"),
}
MORE = {
    f"{family} {cut}{', tied' * tied}": (family, tied, *CUTS[cut])
    for family in FAMILIES
    for cut in CUTS
    for tied in (False, True)
}
CASES = {**ALWAYS, **MORE} if ALL else ALWAYS


def batches(backend, layout):
    rows = [vision_rows(number) for number in range(NUM_STEPS)]
    settings = {"layout": layout, "place": backend.layout, "capacity": 64}
    return [batch_of(r, step=n + 1, **settings) for n, r in enumerate(rows)]


def trained(folder, sizes, layout, out, settings):
    """{losses, norms, evaluated} of this rank; the export of the trained model lies in ``out``."""
    with opened(folder, sizes=Sizes(**sizes), **settings) as backend:
        made = batches(backend, layout)
        results = [backend.train_step(batch) for batch in made]
        evaluated = backend.eval_loss(made[0])
        if out:
            backend.export(Path(out))
        return {
            "losses": [r.loss for r in results],
            "norms": [r.grad_norm for r in results],
            "evaluated": evaluated[0],
        }


def as_published(folder):
    """What is tied stands in the config of the whole alone."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["text_config"]["tie_word_embeddings"]
    file.write_text(json.dumps(config))


class Reference:
    """A model in a folder and what the hand-written loop makes of it."""

    def __init__(self, folder, family, *, tied=False, layers=4, **settings):
        self.folder = save_vision_model(folder, family, tied=tied, layers=layers)
        as_published(folder)
        steps = [vision_rows(number) for number in range(NUM_STEPS)]
        self.losses, self.norms, self.model = reference_run(self.folder, steps, lr=LR, **settings)
        with torch.no_grad():
            self.evaluated = float(summed_loss(self.model, steps[0]))

    @torch.no_grad()
    def distances(self, results, exported=None):
        """{kind: the greatest relative distance} of all ranks, and of the weights in ``exported``."""
        found = {}
        for kind, name, expected in (
            ("loss", "losses", self.losses),
            ("norm", "norms", self.norms),
            ("evaluation", "evaluated", self.evaluated),
        ):
            found[kind] = float(np.max([np.abs(np.array(result[name]) / expected - 1) for result in results]))
        if exported:
            model = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32)
            again = dict(model.named_parameters())
            weights = [float((again[n] - w).norm() / w.norm()) for n, w in self.model.named_parameters()]
            found["weight"] = float(np.max(weights))
        return found


@pytest.fixture(scope="module")
def matrix(request):
    """What cases add their distances to; written out at the end of a run of all."""
    rows = {}
    yield rows
    if ALL:
        lines = [["case", *LIMITS], ["---"] * (1 + len(LIMITS))]
        lines += [[case, *(f"{found[k]:.0e}" if k in found else "" for k in LIMITS)] for case, found in rows.items()]
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("", *(f"| {' | '.join(line)} |" for line in lines), sep="\n")


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    made = {}

    def of(family, *, tied=False, **settings):
        key = (family, tied, str(settings))
        if key not in made:
            made[key] = Reference(tmp_path_factory.mktemp(family), family, tied=tied, **settings)
        return made[key]

    return of


@pytest.mark.parametrize("case", CASES)
def test_cuts_equal_the_hand_written_loop(reference_of, matrix, case, tmp_path):
    family, tied, ranks, sizes, layout = CASES[case]
    # Two layers of Qwen3-VL are given features, so a part of it has two at least.
    layers = {"layers": 8} if family == "qwen3_vl" and sizes == VP2 else {}
    reference = reference_of(family, tied=tied, **layers)
    results = on_megatron(ranks, trained, reference.folder, sizes, layout, str(tmp_path / "out"), {})
    matrix[case] = reference.distances(results, tmp_path / "out")
    assert not too_far(matrix[case])
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


RATES = {"vision": 1e-4, "projector": 3e-3}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECIPES = {
    "rates, PP2": ({"rates": RATES}, {"lr_by_part": RATES}, 2, PP2),
    "words frozen, PP2": ({"frozen": ("language",)}, {"frozen": ("language",)}, 2, PP2),
    "tower frozen, DP2": ({"frozen": ("vision",)}, {"frozen": ("vision",)}, 2, {}),
    "layers computed again, PP2": ({}, {"transformer_config_kwargs": RECOMPUTED}, 2, PP2),
    "all but words frozen": ({"frozen": ("vision", "projector")}, {"frozen": ("vision", "projector")}, 1, {}),
}
SOME_RECIPES = ("rates, PP2",)


@pytest.mark.parametrize("recipe", RECIPES if ALL else SOME_RECIPES)
@pytest.mark.parametrize("tied", [False, True] if ALL else [True])
def test_parts_are_frozen_and_have_rates_of_their_own(reference_of, matrix, recipe, tied, tmp_path):
    asked, settings, ranks, sizes = RECIPES[recipe]
    reference = reference_of("qwen2_5_vl", tied=tied, **asked)
    results = on_megatron(ranks, trained, reference.folder, sizes, "packed", str(tmp_path / "out"), settings)
    matrix[f"{recipe}{', tied' * tied}"] = found = reference.distances(results, tmp_path / "out")
    assert not too_far(found)


def images_on_one_rank(folder):
    """Loss and norm of a step whose only image is on rank 0."""
    with opened(folder) as backend:
        rows = vision_rows(7, kinds=("one", "text"))
        result = backend.train_step(batch_of(rows, layout="shared", micro_batch_size=1, place=backend.layout))
        return result.loss, result.grad_norm


def test_an_image_on_one_rank_only(reference_of):
    folder = reference_of("qwen2_5_vl", tied=True).folder
    (loss,), (norm,), _ = reference_run(folder, [vision_rows(7, kinds=("one", "text"))], lr=LR)
    for found in on_megatron(2, images_on_one_rank, folder):
        assert found == pytest.approx((loss, norm), rel=1e-5)


def saved(folder, sizes, frozen, to):
    """A checkpoint of the first step in ``to``."""
    with opened(folder, sizes=Sizes(**sizes), frozen=frozen) as backend:
        backend.train_step(batches(backend, "packed")[0])
        backend.save(to).wait()


def resumed(folder, sizes, frozen, checkpoint):
    """(losses, norms) of the steps after the first."""
    with opened(folder, sizes=Sizes(**sizes), frozen=frozen) as backend:
        for model in backend._models:
            for parameter in model.parameters():
                parameter.data.fill_(0.123)
        backend.load(checkpoint)
        results = [backend.train_step(batch) for batch in batches(backend, "packed")[1:]]
        return [r.loss for r in results], [r.grad_norm for r in results]


CHAINS = {
    "TP2, PP2": ((), 2, TP2, 2, PP2),
    "DP2, TP2": ((), 2, {}, 2, TP2),
    "PP2 x DP2, 1": ((), 4, PP2, 1, {}),
    "words frozen: PP2, TP2": (("language",), 2, PP2, 2, TP2),
    "tower frozen: 1, DP2": (("vision",), 1, {}, 2, {}),
}


@pytest.mark.parametrize("chain", CHAINS if ALL else ("TP2, PP2",))
def test_a_checkpoint_goes_on_in_another_cut(reference_of, chain, tmp_path):
    frozen, ranks, sizes, ranks_after, sizes_after = CHAINS[chain]
    reference = reference_of("qwen2_5_vl", tied=True, **({"frozen": frozen} if frozen else {}))
    on_megatron(ranks, saved, reference.folder, sizes, frozen, tmp_path / "ck")
    for losses, norms in on_megatron(ranks_after, resumed, reference.folder, sizes_after, frozen, tmp_path / "ck"):
        assert losses == pytest.approx(reference.losses[1:], rel=1e-5)
        assert norms == pytest.approx(reference.norms[1:], rel=1e-5)


def faulty(folder, fault):
    """As :func:`trained`, with a fault planted."""
    from burnish.backends.megatron import vision

    def in_a_line(self, position_ids, *_, **__):
        angles = position_ids[:1].expand(3, -1, -1)[self.axes, 0].t() * self.frequencies
        return torch.cat((angles, angles), -1)[:, None, None]

    faults = {
        "images in a line": (vision.Rotary, "forward", in_a_line),
        "images of the words only": (vision.Deepstack, "set", lambda *_, **__: None),
    }
    with patch.object(*faults[fault]):
        return trained(folder, {}, "packed", None, {})


FAULTS = {"images in a line": "qwen2_5_vl", "images of the words only": "qwen3_vl"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(reference_of, fault):
    reference = reference_of(FAULTS[fault])
    assert too_far(reference.distances(on_megatron(1, faulty, reference.folder, fault)))


REFUSED = {
    "context_parallel_size=2": ("qwen2_5_vl", "context_parallel_size", "leave it out"),
    "{tensor_model_parallel_size: 2, sequence_parallel_size: 2}": (
        "qwen2_5_vl",
        "sequence_parallel_size",
        "leave it out",
    ),
    "transformer_config_kwargs.fp8=hybrid": ("qwen2_5_vl", "transformer_config_kwargs.fp8", "leave it out"),
    "transformer_config_kwargs.apply_rope_fusion=true": (
        "qwen2_vl",
        "transformer_config_kwargs.apply_rope_fusion",
        "leave it out",
    ),
    "transformer_config_kwargs.recompute_granularity=full": (
        "qwen3_vl",
        "transformer_config_kwargs.recompute_granularity",
        "leave it out",
    ),
    "{pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 2}": (
        "qwen3_vl",
        "pipeline_model_parallel_size",
        "give sizes of 2 parts at most",
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_with_images_is_refused_by_name(reference_of, words):
    family, key, fix = REFUSED[words]
    folder = reference_of(family).folder
    word = f"megatron_config={words}" if words.startswith("{") else f"megatron_config.{words}"
    config = load_config(None, [f"model.path={folder}", "strategy=megatron", "megatron_config.cpu=true", word])
    problems = {problem.key: problem for problem in model_problems(config, read_card(str(folder)), on_cpu=True)}
    assert problems.keys() == {f"megatron_config.{key}"}
    assert problems[f"megatron_config.{key}"].fix == fix
