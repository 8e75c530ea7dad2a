"""Random rows: full, the same each time, and without what a model gives a meaning."""

import numpy as np
import pytest

from burnish.data.random_rows import RandomStore, random_tokens


@pytest.mark.parametrize("placeholder", [None, 3, 5])
def test_rows_are_full_and_alike_on_every_rank(placeholder):
    one, other = (RandomStore(3, length=400, vocabulary=9, placeholder=placeholder) for _ in range(2))
    assert one.fingerprint == other.fingerprint
    assert one.lengths.tolist() == [400] * 3
    assert one.target_counts.tolist() == [399] * 3
    for row in range(len(one)):
        made = one[row]
        assert np.array_equal(made.input_ids, other[row].input_ids)
        assert (int(made.loss_mask[0]), int(made.loss_mask.sum())) == (0, 399)
        assert set(made.input_ids.tolist()) == set(range(3, 9)) - {placeholder}
    assert not np.array_equal(one[0].input_ids, one[1].input_ids)
    assert one.fingerprint != RandomStore(3, length=400, vocabulary=10).fingerprint


def test_tokens_are_below_the_vocabulary():
    drawn = random_tokens(1000, vocabulary=7, seed=1)
    assert (drawn.min(), drawn.max(), drawn.dtype) == (3, 6, np.int32)
