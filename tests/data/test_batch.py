"""Micro-batches: labels are the next token of the same segment, where that is a target."""

import numpy as np

from burnish.data.batch import IGNORE, collate
from burnish.data.example import Example
from burnish.data.packing import Layout


def example(ids, mask):
    return Example(np.array(ids, np.uint16), np.array(mask, np.uint8))


A, B = example([1, 2, 3], [0, 1, 1]), example([4, 5, 6, 7], [1, 1, 0, 1])


def test_two_segments_in_one_row():
    batch = collate({0: A, 1: B}, ((0, 1),), sources={0: 0, 1: 5}, pad_id=9, layout=Layout())
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.labels.tolist() == [[2, 3, IGNORE, 5, IGNORE, 7, IGNORE]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 2]]
    assert batch.segment_sources.tolist() == [[0, 0, 0, 5, 5, 5, 5]]


def test_a_row_each_is_padded_to_the_longest():
    batch = collate({0: A, 1: B}, ((0,), (1,)), sources={0: 0, 1: 0}, pad_id=9, layout=Layout(row_multiple=3))
    assert batch.input_ids.tolist() == [[1, 2, 3, 9, 9, 9], [4, 5, 6, 7, 9, 9]]
    assert batch.labels.tolist() == [[2, 3] + [IGNORE] * 4, [5, IGNORE, 7] + [IGNORE] * 3]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_a_filler_row_has_a_token_and_no_target():
    batch = collate({}, ((),), sources={}, pad_id=9, layout=Layout())
    assert batch.input_ids.tolist() == [[9]]
    assert (batch.labels == IGNORE).all()
    assert (batch.segment_ids == 0).all()


def test_an_example_of_one_token_predicts_nothing():
    batch = collate({0: example([5], [1])}, ((0,),), sources={0: 0}, pad_id=9, layout=Layout())
    assert batch.labels.tolist() == [[IGNORE]]
