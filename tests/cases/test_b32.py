"""B32: the limit of an id is the model's embedding, not the tokenizer's vocabulary."""

import pytest

from burnish.data.store import open_store
from burnish.errors import DataError
from tests.data.stores import contents, write_shard
from tests.toys import row


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow file"])
def test_the_last_embedding_row_is_an_id(tmp_path, kind):
    file = write_shard(tmp_path, 0, [row([309, 319, 0], [0, 1, 1])], kind=kind)
    assert contents(open_store(file, name="s", num_embeddings=320)) == [([309, 319, 0], [0, 1, 1])]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow file"])
@pytest.mark.parametrize("bad", [320, -1, -100, 2**31, 65535])
def test_others_are_named(tmp_path, kind, bad):
    rows = [row([1, 2], [0, 1]), row([1, 309, bad], [0, 1, 1])]
    file = write_shard(tmp_path, 0, rows, kind=kind)
    with pytest.raises(DataError, match=rf"{file.name}, row 1: input_ids holds {bad}\b") as error:
        open_store(file, name="s", num_embeddings=320)
    assert ("labels" in error.value.fix) == (bad == -100)


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_the_largest_uint16(tmp_path, kind):
    file = write_shard(tmp_path, 0, [row([1, 65535], [0, 1])], kind=kind, ids="uint16")
    with pytest.raises(DataError, match="row 0: input_ids holds 65535; the model has 320 embedding rows"):
        open_store(file, name="s", num_embeddings=320)
    assert contents(open_store(file, name="s")) == [([1, 65535], [0, 1])]
