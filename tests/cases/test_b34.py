"""B34: forbidden columns and padded rows, wherever the row stands."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import write_arrow
from tests.toys import row, write_jsonl

GOOD = row([1, 2, 3], [0, 1, 1])
SCHEMA = pa.schema([(n, pa.list_(pa.int64())) for n in ("input_ids", "loss_mask", "attention_mask", "labels")])
BAD = [
    (GOOD | {"attention_mask": [1, 1, 0]}, "attention_mask must be all ones, found 0", "unpadded"),
    (GOOD | {"attention_mask": [1, 2, 1]}, "attention_mask must be all ones, found 2", "unpadded"),
    (GOOD | {"attention_mask": [1, 1]}, "attention_mask has 2 elements for 3 input_ids", "unpadded"),
    (row([1, 2, 3, 4, 5], [1, 1]), "loss_mask has 2 elements for 5 input_ids", r"\[0\] \* 3 \+ loss_mask"),
    (row([1, 2, 3], [0, 1, 1, 1]), "loss_mask has 4 elements for 3 input_ids", "every token"),
    ({"input_ids": [1], "loss_mask": None}, "loss_mask is null", "every token"),
]
ONLY_JSON = [
    (GOOD | {"labels": [-100, 2, 3]}, "has the column labels", "1 where labels are not -100"),
    ({"input_ids": [1, 2], "labels": [-100, 2]}, "has the column labels", "1 where labels are not -100"),
    (GOOD | {"num_actions": 2}, "has the column num_actions", "every token of the row"),
    ({"input_ids": [1, 2]}, "has no loss_mask", "every token"),
    ({"loss_mask": [1, 2]}, "has no input_ids", "token ids"),
    (row([[1, 2, 3]], [0, 1, 1]), "input_ids holds a list", "list of integers"),
    (row(5, [1]), "input_ids is an integer", "list of integers"),
]


def write(folder, kind, rows):
    """Two shards; the second holds the rows."""
    for number, part in enumerate(([GOOD] * 3, rows)):
        stem = folder / f"part-{number}"
        if kind == "jsonl":
            write_jsonl(stem.with_suffix(".jsonl"), part)
            continue
        folder.mkdir(exist_ok=True)
        names = sorted({name for r in rows for name in r})
        table = pa.Table.from_pylist(part, schema=pa.schema([SCHEMA.field(n) for n in names]))
        if kind == "parquet":
            pq.write_table(table, stem.with_suffix(".parquet"), row_group_size=999)
        else:
            write_arrow(stem.with_suffix(".arrow"), table, kind=kind, chunk=999)
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow file", "arrow stream"])
@pytest.mark.parametrize(("bad", "problem", "fix"), BAD)
def test_the_last_of_5000_rows(tmp_path, kind, bad, problem, fix):
    with pytest.raises(DataError, match=rf"part-1\.\w+, row 4999: {problem}\n  fix: .*{fix}"):
        open_store(write(tmp_path / "store", kind, [GOOD] * 4999 + [bad]), name="s")


@pytest.mark.parametrize(("bad", "problem", "fix"), ONLY_JSON)
def test_the_last_of_5000_json_rows(tmp_path, bad, problem, fix):
    with pytest.raises(DataError, match=rf"part-1\.jsonl, row 4999: {problem}.*\n  fix: .*({fix})"):
        open_store(write(tmp_path / "store", "jsonl", [GOOD] * 4999 + [bad]), name="s")


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
@pytest.mark.parametrize("columns", [["input_ids", "loss_mask", "labels"], ["input_ids", "labels"]])
def test_labels_beside_the_mask_and_alone(tmp_path, kind, columns):
    rows = [{name: (GOOD | {"labels": [-100, 2, 3]})[name] for name in columns}]
    with pytest.raises(
        DataError, match=r"part-0\.\w+, row 0: has the column labels\n  fix: .* where labels are not -100"
    ):
        open_store(write(tmp_path / "store", kind, rows), name="s")


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow file"])
def test_what_passes(tmp_path, kind):
    rows = [GOOD | {"attention_mask": [1, 1, 1]}, GOOD | {"attention_mask": None}, GOOD]
    assert len(open_store(write(tmp_path / "store", kind, rows), name="s")) == 6


def test_other_columns_are_ignored(tmp_path):
    rows = [GOOD | {"messages": [{"role": "user", "content": "labels"}], "labels_text": "x", "position_ids": None}] * 2
    assert len(open_store(write_jsonl(tmp_path / "a.jsonl", rows), name="s")) == 2
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    assert len(open_store(tmp_path / "b.parquet", name="s")) == 2
