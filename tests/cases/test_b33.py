"""B33: what is no integer is rejected, the same in every format and wherever the row stands."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import contents, to_table, write_arrow, write_shard
from tests.toys import row

GOOD = '{"input_ids": [1, 2], "loss_mask": [0, 1]}'
TEXTS = [
    ("[1.0, 2.0]", "[0, 1]", "input_ids holds a fraction"),
    ("[1.5, 2]", "[0, 1]", "input_ids holds a fraction"),
    ('["1", "2"]', "[0, 1]", "input_ids holds text"),
    ("[1, 1e1]", "[0, 1]", "input_ids holds a fraction"),
    ("[true, false]", "[0, 1]", "input_ids holds a boolean"),
    ("[1, true]", "[0, 1]", "input_ids holds a boolean"),
    ("[1, 9223372036854775808]", "[0, 1]", "input_ids holds an integer"),
    ("[1, -9223372036854775809]", "[0, 1]", "input_ids holds an integer"),
    ("[1, null]", "[0, 1]", "input_ids holds a null"),
    ("[1, [2]]", "[0, 1]", "input_ids holds a list"),
    ("[1, 2]", "[0.0, 1.0]", "loss_mask holds a fraction"),
    ("[1, 2]", "[0, 0.5]", "loss_mask holds a fraction"),
    ("[1, 2]", "[0, NaN]", "loss_mask holds a fraction"),
    ("[1, 2]", '[0, "1"]', "loss_mask holds text"),
    ("1", "[0]", "input_ids is an integer"),
    ('"12"', "[0, 1]", "input_ids is text"),
]


@pytest.mark.parametrize(("ids", "mask", "problem"), TEXTS)
@pytest.mark.parametrize("row_number", [0, 3, 4999])
def test_json(tmp_path, ids, mask, problem, row_number):
    lines = [GOOD] * row_number + [f'{{"input_ids": {ids}, "loss_mask": {mask}}}', GOOD]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=rf"a\.jsonl, row {row_number}: {problem}.*\n  fix: store"):
        open_store(tmp_path / "a.jsonl", name="s")


def test_json_booleans_and_integers_mix_in_the_mask_only(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"input_ids": [1, 2], "loss_mask": [false, true]}\n'
        '{"input_ids": [1, 2], "loss_mask": [0, 1]}\n'
        '{"input_ids": [1, 2, 3], "loss_mask": [0, true, 1]}\n'
    )
    assert contents(open_store(tmp_path / "a.jsonl", name="s")) == [([1, 2], [0, 1])] * 2 + [([1, 2, 3], [0, 1, 1])]


def write(folder, table, kind):
    file = folder / f"a.{kind}"
    pq.write_table(table, file) if kind == "parquet" else write_arrow(file, table)
    return file


COLUMNS = [
    ("input_ids", [[1.0, 2.0]], pa.list_(pa.float64()), "a fraction"),
    ("input_ids", [[1.0, 2.0]], pa.list_(pa.float16()), "a fraction"),
    ("input_ids", [["1", "2"]], pa.list_(pa.string()), "text"),
    ("input_ids", [[True, False]], pa.list_(pa.bool_()), "a boolean"),
    ("input_ids", [[[1], [2]]], pa.list_(pa.list_(pa.int64())), "a list"),
    ("input_ids", [1], pa.int64(), "an integer"),
    ("input_ids", ["1 2"], pa.string(), "text"),
    ("loss_mask", [[0.0, 1.0]], pa.list_(pa.float32()), "a fraction"),
    ("loss_mask", [[0.0, float("nan")]], pa.list_(pa.float64()), "a fraction"),
]


@pytest.mark.parametrize(("name", "values", "kind_of", "found"), COLUMNS)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns(tmp_path, name, values, kind_of, found, kind):
    table = to_table([row([1, 2], [0, 1])])
    place = table.schema.names.index(name)
    table = table.set_column(place, name, pa.array(values, kind_of))
    with pytest.raises(DataError, match=rf"a\.{kind}, row 0: {name} .*{found}"):
        open_store(write(tmp_path, table, kind), name="s")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("integer", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("lists", ["list", "large_list", "dictionary"])
def test_every_width_and_list(tmp_path, kind, integer, lists):
    rows = [row([1, 2], [0, 1]), row([3, 4], [1, 1])]
    store = open_store(write(tmp_path, to_table(rows, ids=integer, mask=integer, lists=lists), kind), name="s")
    assert contents(store) == [([1, 2], [0, 1]), ([3, 4], [1, 1])]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_fixed_size_lists(tmp_path, kind):
    fixed = {"input_ids": pa.list_(pa.int32(), 2), "loss_mask": pa.list_(pa.bool_(), 2)}
    rows = {"input_ids": [[1, 2], [3, 4], [5, 6]], "loss_mask": [[False, True]] * 3}
    table = pa.table({name: pa.array(rows[name], fixed[name]) for name in rows})
    store = open_store(write(tmp_path, table, kind), name="s")
    assert contents(store) == [([1, 2], [0, 1]), ([3, 4], [0, 1]), ([5, 6], [0, 1])]


def test_all_formats_accept_and_reject_alike(tmp_path):
    for kind in ("parquet", "jsonl", "arrow file", "arrow stream"):
        file = write_shard(tmp_path / kind, 0, [row([1, 2], [False, True])], kind=kind, mask="bool")
        assert contents(open_store(file, name="s")) == [([1, 2], [0, 1])]
