"""Megatron Core equals the hand-written loop and FSDP, however the model is cut; and planted faults do not.

A few cuts always; all of them with BURNISH_MEGATRON=all (``make test-megatron``).
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from burnish.backends.megatron.sizes import Sizes
from tests.backends.megatron_runs import ALL, LIMITS, LR, distances, gradients_of, run, step_rows, too_far
from tests.backends.steps import batch_of, opened, reference_run, summed_loss
from tests.backends.test_megatron_weights import FAMILIES, save_family
from tests.ranks import on_ranks
from tests.toys import save_tokenizer

NUM_STEPS = 3
SP2 = {"tensor": 2, "sequence_parallel": True}
ALWAYS = {
    "1": (1, {}, "shared"),
    "1 packed": (1, {}, "packed"),
    "TP2+SP": (2, SP2, "shared"),
    "PP2 packed": (2, {"pipeline": 2}, "packed"),
    "CP2 packed": (2, {"context": 2}, "packed"),
}
MORE = {
    "1 padded": (1, {}, "padded"),
    "TP2 packed": (2, {"tensor": 2}, "packed"),
    "TP4+SP": (4, {"tensor": 4, "sequence_parallel": True}, "shared"),
    "TP2": (2, {"tensor": 2}, "shared"),
    "TP2+SP packed": (2, SP2, "packed"),
    "TP2+SP padded": (2, SP2, "padded"),
    "PP2": (2, {"pipeline": 2}, "shared"),
    "PP2 padded": (2, {"pipeline": 2}, "padded"),
    "PP4 packed": (4, {"pipeline": 4}, "packed"),
    "VP2": (2, {"pipeline": 2, "virtual_pipeline": 2}, "shared"),
    "VP2 packed": (2, {"pipeline": 2, "virtual_pipeline": 2}, "packed"),
    "VP2 padded": (2, {"pipeline": 2, "virtual_pipeline": 2}, "padded"),
    "CP2": (2, {"context": 2}, "shared"),
    "CP2 padded": (2, {"context": 2}, "padded"),
    "CP4 packed": (4, {"context": 4}, "packed"),
    "DP2": (2, {}, "shared"),
    "DP2 packed": (2, {}, "packed"),
    "DP3": (3, {}, "shared"),
    "TP2 x PP2": (4, {"tensor": 2, "pipeline": 2}, "shared"),
    "TP2+SP x PP2 packed": (4, {**SP2, "pipeline": 2}, "packed"),
    "TP2 x CP2 packed": (4, {"tensor": 2, "context": 2}, "packed"),
    "PP2 x DP2 packed": (4, {"pipeline": 2}, "packed"),
    "TP2+SP x PP2 x CP2 packed": (8, {**SP2, "pipeline": 2, "context": 2}, "packed"),
}
TIED = ("TP2", "PP2 packed", "CP2 packed", "VP2", "PP2 x DP2 packed", "TP2+SP x PP2 x CP2 packed")
"""Cuts where the head is the embedding as well: stages that hold a copy each, and rows that fill up the vocabulary."""
CASES = {**ALWAYS, **MORE} if ALL else ALWAYS
CUTS = {
    "1 packed": (1, {}, "packed"),
    "TP2+SP x PP2": (4, {**SP2, "pipeline": 2}, "shared"),
    "CP2 packed": (2, {"context": 2}, "packed"),
}
FAMILY_CASES = {
    f"{family}{'-tied' * tied} {cut}": (family, tied, *CUTS[cut])
    for family in FAMILIES
    for tied in (False, True)
    for cut in CUTS
}
EP2 = {"qwen3-moe EP2": ("qwen3-moe", False, 2, {"expert": 2}, "shared")}
SOME_FAMILIES = {name: FAMILY_CASES[name] for name in ("llama 1 packed", "qwen2-tied 1 packed")}
FAULTS = {
    "queries not interleaved": (1, {}, "shared"),
    "no segments": (1, {}, "packed"),
    "loss per micro-batch": (1, {}, "shared"),
    "contiguous parts of a row": (2, {"context": 2}, "packed"),
    "norms not marked": (2, SP2, "shared"),
    "bounds missing on a middle stage": (4, {"pipeline": 4}, "packed"),
}


class Reference:
    """A model in a folder and what the hand-written loop makes of it."""

    def __init__(self, folder):
        self.folder = folder
        steps = [step_rows(number) for number in range(NUM_STEPS)]
        losses, norms, self.trained = reference_run(folder, steps, lr=LR)
        with torch.no_grad():
            self.numbers = (losses, norms, float(summed_loss(self.trained, steps[0])))
        untrained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.gradients = gradients_of(untrained, steps[0])

    @torch.no_grad()
    def distances(self, results, exported):
        model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        found = dict(model.named_parameters())
        weights = [float((found[n] - w).norm() / w.norm()) for n, w in self.trained.named_parameters()]
        return {**distances(results, self.numbers, self.gradients), "weight": float(np.max(weights))}


@pytest.fixture(scope="module")
def matrix(request):
    """What cases add their distances to; written out at the end of a run of all."""
    rows = {}
    yield rows
    if ALL:
        lines = [["case", "ranks", *LIMITS], ["---"] * (2 + len(LIMITS))]
        lines += [
            [case, str(ranks), *(found.get(kind, "") for kind in LIMITS)] for case, (ranks, found) in rows.items()
        ]
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print("", *(f"| {' | '.join(line)} |" for line in lines), sep="\n")


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory):
    made = {}

    def of(family, tied):
        if (family, tied) not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family, tied] = Reference(save_tokenizer(save_family(folder, family, tied=tied)))
        return made[family, tied]

    return of


@pytest.mark.parametrize(
    ("case", "tied"), [*((case, False) for case in CASES), *((case, True) for case in TIED if case in CASES)]
)
def test_cuts_equal_the_hand_written_loop(reference_of, matrix, case, tied, tmp_path):
    check(matrix, f"{case}{', tied' * tied}", reference_of("qwen3", tied), CASES[case], tmp_path / "out")


@pytest.mark.parametrize("case", {**FAMILY_CASES, **EP2} if ALL else SOME_FAMILIES)
def test_families_equal_the_hand_written_loop(reference_of, matrix, case, tmp_path):
    family, tied, *cut = {**FAMILY_CASES, **EP2}[case]
    check(matrix, case, reference_of(family, tied), cut, tmp_path / "out")


def check(matrix, case, reference, cut, out):
    ranks, sizes, layout = cut
    results = run(reference.folder, Sizes(**sizes), ranks=ranks, layout=layout, out=str(out))
    found = reference.distances(results, out)
    matrix[case] = ranks, {kind: f"{value:.0e}" for kind, value in found.items()}
    assert not too_far(found)


def fsdp_losses(model_dir, layout):
    with opened(model_dir, num_steps=10, num_sources=2, learning_rate=LR, eps=1e-6, schedule="constant") as backend:
        place = backend.layout
        batches = [batch_of(step_rows(n), step=n + 1, layout=layout, place=place) for n in range(NUM_STEPS)]
        return [(result.loss_sums, result.num_targets) for result in map(backend.train_step, batches)]


def megatron_losses(model_dir, layout):
    from tests.backends import megatron_runs

    with megatron_runs.opened(model_dir) as backend:
        place = backend.layout
        batches = [batch_of(step_rows(n), step=n + 1, layout=layout, place=place) for n in range(NUM_STEPS)]
        return [(result.loss_sums, result.num_targets) for result in map(backend.train_step, batches)]


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
def test_each_source_costs_what_it_costs_fsdp(reference_of, layout):
    folder = reference_of("qwen3", False).folder
    (expected,) = on_ranks(1, fsdp_losses, folder, layout)
    (found,) = on_ranks(1, megatron_losses, folder, layout, pool="megatron")
    for (sums, targets), (expected_sums, expected_targets) in zip(found, expected, strict=True):
        assert sums == pytest.approx(expected_sums, rel=1e-5)
        assert targets == expected_targets


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(reference_of, fault):
    ranks, sizes, layout = FAULTS[fault]
    reference = reference_of("qwen3", False)
    results = run(reference.folder, Sizes(**sizes), ranks=ranks, layout=layout, num_steps=1, fault=fault)
    assert too_far(distances(results, reference.numbers, reference.gradients))
