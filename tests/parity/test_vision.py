"""Rows with images: packed as alone, on two ranks as on one, frozen or not, as the hand-written loop."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from burnish.backends.tensors import model_inputs
from burnish.models.load import read_card
from burnish.models.vision import FAMILIES
from tests.backends.steps import batch_of, opened
from tests.ranks import on_ranks
from tests.vision_models import logits_alone, reference_run, save_vision_model, summed_loss, vision_rows

LR = 1e-3
NUM_STEPS = 3
SETTINGS = {"num_steps": 10, "num_sources": 2, "eps": 1e-6, "schedule": "constant", "learning_rate": LR}
LAYOUTS = ("shared", "padded", "packed")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(folder, losses, norms, the trained model) of the reference loop."""
    folder = save_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    return folder, *reference_run(folder, [vision_rows(n) for n in range(NUM_STEPS)], lr=LR)


def batches(layout, place, **settings):
    rows = [vision_rows(number) for number in range(NUM_STEPS)]
    return [batch_of(r, step=n + 1, layout=layout, place=place, capacity=64, **settings) for n, r in enumerate(rows)]


def trained(folder, layout, out, settings):
    """(losses, norms, evaluated) of this rank; the export lies in ``out``."""
    with opened(folder, **{**SETTINGS, **settings}) as backend:
        made = batches(layout, backend.layout)
        results = [backend.train_step(batch) for batch in made]
        evaluated = backend.eval_loss(made[0])
        if out:
            backend.export(Path(out))
        return [r.loss for r in results], [r.grad_norm for r in results], evaluated


def assert_exported(out, model):
    again = dict(AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).named_parameters())
    for name, weight in model.named_parameters():
        assert (again[name] - weight).norm() <= 1e-4 * weight.norm(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_rows_equal_the_hand_written_loop(family, layout, tmp_path):
    folder, losses, norms, model = family
    ((found, found_norms, evaluated),) = on_ranks(1, trained, folder, layout, str(tmp_path / "out"), {})
    assert found == pytest.approx(losses, rel=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    with torch.no_grad():
        assert evaluated[0] == pytest.approx(float(summed_loss(model, vision_rows(0))), rel=1e-5)
    assert_exported(tmp_path / "out", model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_though_one_may_have_no_image(family, layout):
    folder, losses, norms, _ = family
    for found, found_norms, _ in on_ranks(2, trained, folder, layout, None, {}):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("spread", [{"activation_checkpointing": True}, {"fsdp_size": 1}], ids=str)
def test_two_ranks_equal_one_however_the_model_is_spread(family, spread):
    folder, losses, norms, _ = family
    for found, found_norms, _ in on_ranks(2, trained, folder, "packed", None, spread):
        assert found == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)


def images_on_one_rank(folder, frozen):
    """Loss and norm of a step whose only image is on rank 0."""
    with opened(folder, **SETTINGS, frozen=frozen) as backend:
        rows = vision_rows(7, kinds=("one", "text"))
        result = backend.train_step(batch_of(rows, layout="shared", micro_batch_size=1, place=backend.layout))
        return result.loss, result.grad_norm


@pytest.mark.parametrize("frozen", [(), ("vision",), ("vision", "projector"), ("language",)], ids=str)
def test_an_image_on_one_rank_only(family, frozen):
    folder = family[0]
    (loss,), (norm,), _ = reference_run(folder, [vision_rows(7, kinds=("one", "text"))], lr=LR, frozen=frozen)
    for found in on_ranks(2, images_on_one_rank, folder, frozen):
        assert found == pytest.approx((loss, norm), rel=1e-5)


def test_parts_with_rates_of_their_own(family, tmp_path):
    folder = family[0]
    rates = {"vision": 1e-4, "projector": 3e-3}
    steps = [vision_rows(number) for number in range(NUM_STEPS)]
    losses, norms, model = reference_run(folder, steps, lr=LR, rates=rates)
    settings = {"lr_by_part": rates}
    ((found, found_norms, _),) = on_ranks(1, trained, folder, "packed", str(tmp_path / "out"), settings)
    assert found == pytest.approx(losses, rel=1e-5)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    assert_exported(tmp_path / "out", model)


def test_frozen_parts_stay_as_they_are(family, tmp_path):
    folder = family[0]
    on_ranks(1, trained, folder, "packed", str(tmp_path / "out"), {"frozen": ("vision", "language")})
    before = dict(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).named_parameters())
    after = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters())
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "merger" in name and "visual" in name}


def packed_logits(folder, out):
    """After a step: logits of rows in one row of tokens less those of each alone, by ``transformers`` from the export.

    And what another image in the first row changes in the others.
    """
    rows = vision_rows(3, kinds=("two", "one", "text"))
    card = read_card(str(folder)).vision
    with opened(folder, **SETTINGS) as backend:
        backend.train_step(batches("packed", backend.layout)[0])
        backend.export(Path(out))
        model = backend._model.eval()

        def together(examples):
            (micro_batch,) = batch_of(examples, layout="packed", place=backend.layout, capacity=200).micro_batches
            inputs = model_inputs(micro_batch, device=torch.device("cpu"), vision=card)
            asked = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
            with torch.no_grad():
                hidden = model._output(inputs["input_ids"], inputs["position_ids"], inputs["segments"], **asked)
                return model.head.apply(model.model.get_output_embeddings()(hidden.last_hidden_state))[0]

        first, changed = together(rows), together([*vision_rows(4, kinds=("two",)), *rows[1:]])
    native = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        alone = torch.cat([logits_alone(native, one) for one in rows])
    start = len(rows[0].input_ids)
    return [float((first - alone).abs().max() / alone.abs().max()), float((first - changed)[start:].abs().max())]


def test_packed_logits_are_those_of_each_alone_from_the_export(family, tmp_path):
    ((difference, leaked),) = on_ranks(1, packed_logits, family[0], str(tmp_path / "out"))
    assert difference < 1e-5
    assert leaked == 0


def positions_moved(inputs):
    return {**inputs, "position_ids": inputs["position_ids"][0]}


def faulty(folder):
    """Losses where image tokens stand in a line, as text does."""
    from unittest.mock import patch

    from burnish.backends import tensors

    whole = tensors.model_inputs
    with patch.object(tensors, "model_inputs", lambda *a, **k: positions_moved(whole(*a, **k))):
        return trained(folder, "packed", None, {})


def test_images_in_a_line_would_be_noticed(family):
    folder, losses, _, _ = family
    ((found, *_),) = on_ranks(1, faulty, folder)
    assert np.abs(np.array(found) / losses - 1).max() > 1e-5
