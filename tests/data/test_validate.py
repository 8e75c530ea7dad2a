from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from burnish.data.validate import Place, check_rows
from burnish.errors import DataError
from tests.data.stores import to_table
from tests.toys import row

ROWS = [row([1, 2, 3], [0, 1, 1]), row([], []), row([4, 5], [1, 0]), row([6], [0])]


def batch_of(rows, **types):
    (batch,) = to_table(rows, **types).combine_chunks().to_batches()
    return batch


def check(batch, *, first_row=0, num_embeddings=None):
    return check_rows(batch, place=Place(Path("f"), first_row), num_embeddings=num_embeddings)


@pytest.mark.parametrize("lists", ["list", "large_list", "dictionary"])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 4), (2, 3), (0, 2), (1, 2)])
def test_slices_of_a_batch(lists, start, stop):
    rows = check(batch_of(ROWS, lists=lists).slice(start, stop - start))
    cut = ROWS[start:stop]
    assert rows.offsets.tolist() == np.cumsum([0, *(len(r["input_ids"]) for r in cut)]).tolist()
    assert rows.input_ids.tolist() == [v for r in cut for v in r["input_ids"]]
    assert rows.loss_mask.tolist() == [v for r in cut for v in r["loss_mask"]]


def test_slices_of_fixed_size_lists():
    table = pa.table(
        {n: pa.array([[1, 0], [0, 1], [1, 1]], pa.list_(pa.int8(), 2)) for n in ("input_ids", "loss_mask")}
    )
    rows = check(table.to_batches()[0].slice(1))
    assert (rows.input_ids.tolist(), rows.offsets.tolist()) == ([0, 1, 1, 1], [0, 2, 4])


def test_plain_columns_are_not_copied():
    batch = batch_of(ROWS, ids="uint16", mask="int32")
    rows = check(batch)
    assert rows.input_ids.dtype == np.uint16
    assert rows.loss_mask.dtype == np.int32
    for array, name in ((rows.input_ids, "input_ids"), (rows.loss_mask, "loss_mask")):
        assert array.ctypes.data == batch.column(name).values.buffers()[1].address


def test_rows_are_numbered_in_the_file():
    bad = [*ROWS, row([7, -3], [0, 1])]
    with pytest.raises(DataError, match="f, row 1004: input_ids holds -3, an id below 0"):
        check(batch_of(bad), first_row=1000)
    with pytest.raises(DataError, match="f, row 1003: input_ids holds 6"):
        check(batch_of(ROWS).slice(1), first_row=1001, num_embeddings=6)


def test_columns_of_nulls_and_of_empty_lists():
    nulls = pa.record_batch({"input_ids": pa.nulls(2), "loss_mask": pa.nulls(2)})
    with pytest.raises(DataError, match="row 0: input_ids is null"):
        check(nulls)
    empty = pa.array([[], []], pa.list_(pa.null()))
    assert check(pa.record_batch({"input_ids": empty, "loss_mask": empty})).offsets.tolist() == [0, 0, 0]
    fractions = pa.array([[], []], pa.list_(pa.float64()))
    with pytest.raises(DataError, match="input_ids has elements of type double"):
        check(pa.record_batch({"input_ids": fractions, "loss_mask": empty}))


def test_missing_and_doubled_columns():
    batch = batch_of(ROWS)
    for name in ("input_ids", "loss_mask"):
        with pytest.raises(DataError, match=f"has no {name}"):
            check(batch.select([n for n in batch.schema.names if n != name]))
    twice = pa.RecordBatch.from_arrays(
        [batch.column(0), batch.column(1), batch.column(1)], names=[*batch.schema.names, "loss_mask"]
    )
    with pytest.raises(DataError, match="has the column loss_mask twice"):
        check(twice)


def test_what_no_integer_holds():
    batch = batch_of([row([1, 2**63], [0, 1])], ids="uint64")
    with pytest.raises(DataError, match="input_ids holds 9223372036854775808"):
        check(batch)
    booleans = batch_of(ROWS).append_column("attention_mask", pa.array([[True] * 3, [], [True] * 2, [True]]))
    with pytest.raises(DataError, match="attention_mask has elements of type bool"):
        check(booleans)


def test_attention_masks_between_nulls():
    masks = pa.array([None, [], None, [1]], pa.list_(pa.int8()))
    assert len(check(batch_of(ROWS).append_column("attention_mask", masks)).input_ids) == 6
    masks = pa.array([None, None, None, [0]], pa.list_(pa.int8()))
    with pytest.raises(DataError, match="row 3: attention_mask must be all ones, found 0"):
        check(batch_of(ROWS).append_column("attention_mask", masks))
    assert len(check(batch_of(ROWS).append_column("attention_mask", pa.nulls(4))).input_ids) == 6


def test_long_values_are_shortened():
    column = pa.array([["x" * 500]], pa.list_(pa.string()))
    with pytest.raises(DataError) as error:
        check(pa.record_batch({"input_ids": column, "loss_mask": column}))
    assert len(str(error.value)) < 300
