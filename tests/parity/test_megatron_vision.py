"""Rows with images on Megatron Core equal the hand-written loop, however the model is cut; and a planted fault does not.

A few cuts always; all of them with BURNISH_MEGATRON=all (``make test-megatron``).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from burnish.backends.megatron.sizes import Sizes
from tests.backends.megatron_runs import ALL, LIMITS, LR, on_megatron, opened, too_far
from tests.backends.steps import batch_of
from tests.vision_models import reference_run, save_vision_model, summed_loss, vision_rows

FAMILIES = ("qwen2_5_vl", "qwen2_vl")
NUM_STEPS = 3
ALWAYS = {
    "1 padded": (1, {}, "padded"),
    "1 packed": (1, {}, "packed"),
    "TP2 packed": (2, {"tensor": 2}, "packed"),
    "PP2": (2, {"pipeline": 2}, "shared"),
    "DP2": (2, {}, "shared"),
}


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


class Reference:
    """A model in a folder and what the hand-written loop makes of it."""

    def __init__(self, folder, family, *, tied=False, **settings):
        self.folder = save_vision_model(folder, family, tied=tied)
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
def reference_of(tmp_path_factory):
    made = {}

    def of(family, *, tied=False):
        if (family, tied) not in made:
            made[family, tied] = Reference(tmp_path_factory.mktemp(family), family, tied=tied)
        return made[family, tied]

    return of


@pytest.mark.parametrize("case", ALWAYS)
def test_cuts_equal_the_hand_written_loop(reference_of, case, tmp_path):
    ranks, sizes, layout = ALWAYS[case]
    reference = reference_of("qwen2_5_vl")
    results = on_megatron(ranks, trained, reference.folder, sizes, layout, str(tmp_path / "out"), {})
    found = reference.distances(results, tmp_path / "out")
    print(case, found)
    assert not too_far(found)
