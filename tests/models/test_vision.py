"""Where the tokens of images stand, what they cost, and what their models do not go with."""

from itertools import pairwise

import numpy as np
import pytest

from burnish.assemble.model import model_problems
from burnish.config import load_config
from burnish.models.flops import step_flops
from burnish.models.load import read_card
from burnish.models.vision import image_flops, part_of, positions_in_space
from tests.vision_models import IMAGE, save_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def card(folder):
    return read_card(str(folder))


def positions(card, *segments, grids):
    """[4, length] of segments of one row: 1 is a word, ``IMAGE`` a placeholder."""
    ids = np.array([[token for segment in segments for token in segment]])
    ends = np.cumsum([0, *map(len, segments)]).tolist()
    bounds = (tuple(pairwise(ends)),)
    return positions_in_space(ids, bounds, np.array(grids).reshape(-1, 3), card=card.vision)[:, 0].tolist()


def test_an_image_stands_in_its_grid_and_text_goes_on_after_the_longer_side(card):
    found = positions(card, [1, 1, *[IMAGE] * 6, 1, 1], grids=[[1, 4, 6]])
    assert found == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_images_follow_each_other_and_may_last(card):
    found = positions(card, [IMAGE, IMAGE, IMAGE, 1], grids=[[2, 2, 2], [1, 2, 2]])
    assert found[1:] == [[0, 1, 1, 2], [0, 0, 1, 2], [0, 0, 1, 2]]


def test_positions_begin_anew_in_each_segment(card):
    row = [1, *[IMAGE] * 2, 1]
    alone = positions(card, row, grids=[[1, 2, 4]])
    assert positions(card, row, [1, 1], row, grids=[[1, 2, 4], [1, 2, 4]]) == [[*one, 0, 1, *one] for one in alone]


def test_what_an_image_costs(card):
    # A patch is multiplied with the embedding of patches and two layers, each square of four with the projector.
    layer = 3 * 16 * 16 + 16 * 16 + 3 * 16 * 32
    weights, projector = 16 * 96 + 2 * layer, 64 * 64 + 64 * 32
    # In one layer a patch sees its image, in the other a window of 4 x 4.
    pairs = (24 * 24 + 4 * 4) + (24 * 16 + 4 * 4)
    expected = 6 * (weights + projector / 4) * 28 + 12 * 2 * 8 * pairs
    assert image_flops(np.array([24, 4, 0]), card=card.vision).sum() == expected
    text = step_flops(card, lengths=[30], num_targets=3)
    assert step_flops(card, lengths=[30], num_targets=3, patches=[24, 4]) == text + expected
    frozen = step_flops(card, lengths=[30], num_targets=3, patches=[24, 4], tower_frozen=True)
    assert frozen == pytest.approx(text + expected / 3, rel=1e-12)


def test_every_parameter_is_of_one_part():
    assert part_of("model.visual.blocks.0.attn.qkv.weight") == "vision"
    assert part_of("model.visual.merger.mlp.0.weight") == "projector"
    assert part_of("model.visual.deepstack_merger_list.1.norm.weight") == "projector"
    assert part_of("model.language_model.layers.0.mlp.up_proj.weight") == "language"
    assert part_of("lm_head.weight") == "language"


@pytest.mark.parametrize(
    ("words", "key", "said"),
    [
        ("sequence_parallel_size=2", "sequence_parallel_size", "does not go with a model that takes images"),
        ("model.freeze=[vision, projector, language]", "model.freeze", "leaves nothing to train"),
        ("{freeze: [vision], lora: {rank: 4}}", "model.freeze", "trains adapters alone"),
        ("optimizer_config.lr_by_part={vision: 1.0e-4}", "optimizer_config.lr_by_part", "that model.freeze names"),
    ],
)
def test_what_does_not_go_with_images(folder, card, words, key, said):
    given = [f"model.path={folder}", f"model={words}" if words.startswith("{") else words]
    given += ["model.freeze=[vision]"] if "lr_by_part" in words else []
    (problem,) = model_problems(load_config(None, given), card, on_cpu=True)
    assert problem.key == key
    assert said in problem.message


@pytest.mark.parametrize("words", ["model.freeze=[vision]", "optimizer_config.lr_by_part={projector: 1.0e-4}"])
def test_a_model_of_text_has_no_such_parts(model_dir, words):
    (problem,) = model_problems(
        load_config(None, [f"model.path={model_dir}", words]), read_card(str(model_dir)), on_cpu=True
    )
    assert problem.key == words.partition("=")[0]
    assert problem.message == "qwen3 has no such parts"
