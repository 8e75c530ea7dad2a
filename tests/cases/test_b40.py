"""B40: keys are taken literally, whatever characters they hold."""

import pytest

from burnish.errors import BurnishError
from tests.data.stores import write_shard
from tests.runs.commands import burnish
from tests.storage.published import marked, pairs, rows_at
from tests.storage.servers import Bucket

FILE = "part 0#1%20[2].parquet"
ODD = ["br[0]acket", "sp ace", "ha#sh", "per%20cent", "plus+", "star*", "q?m", "uni\u00e9", "eq=1"]
ODD += ["a&b;c,d", "qu'o\"te", "ti~lde", "{b}", "$x", "co:lon@at", "per%", "a..b", "<tag>"]
NEIGHBOURS = ["br0acket", "sp", "ha", "per cent", "plus ", "starfish", "qam", "unie\u0301", "star", "b", "x"]
"""What a pattern, a fragment, an escape or another normal form would make of the odd ones."""


@pytest.fixture(params=["s3_bucket", "google_bucket"])
def bucket(request, tmp_path) -> Bucket:
    """A folder of each name, the rows of each marked with its place in the list."""
    bucket = request.getfixturevalue(request.param)
    for mark, folder in enumerate([*ODD, *NEIGHBOURS]):
        shard = write_shard(tmp_path / "made", 0, marked(mark), kind="parquet")
        bucket.put(f"tok/{folder}/{FILE}", shard.read_bytes())
    return bucket


def test_each_folder_and_each_file_loads_its_own_rows(bucket):
    read = {name: rows_at(bucket.uri(f"tok/{name}")) for name in [*ODD, *NEIGHBOURS]}
    assert read == {name: pairs(marked(mark)) for mark, name in enumerate(read)}
    read = {name: rows_at(bucket.uri(f"tok/{name}/{FILE}")) for name in [*ODD, *NEIGHBOURS]}
    assert read == {name: pairs(marked(mark)) for mark, name in enumerate(read)}


@pytest.mark.parametrize("pattern", ["*", "st*", "star?ish", "br[0-9]acket", "**", "{b,x}", "per%20cent%20", "PLUS+"])
def test_nothing_is_a_pattern(s3_bucket, tmp_path, pattern):
    for mark, folder in enumerate(["star*", "starfish", "br0acket", "b", "x", "plus+"]):
        shard = write_shard(tmp_path / "made", 0, marked(mark), kind="parquet")
        s3_bucket.put(f"tok/{folder}/{FILE}", shard.read_bytes())
    with pytest.raises(BurnishError, match="s3://"):
        rows_at(s3_bucket.uri(f"tok/{pattern}"))


def test_the_command_line_takes_them_too(s3_bucket, tmp_path, model_dir):
    for mark, folder in enumerate(ODD):
        shard = write_shard(tmp_path / "made", 0, marked(mark), kind="parquet")
        s3_bucket.put(f"tok/{folder}/{FILE}", shard.read_bytes())
    paths = repr([s3_bucket.uri(f"tok/{folder}") for folder in ODD])
    command = ["check", f"model.path={model_dir}", f"pretokenized_dataset_paths={paths}", "batch_size=4"]
    done = burnish(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    said = [lines[lines.index(f"train {s3_bucket.uri(f'tok/{folder}')}") + 1] for folder in ODD]
    assert [line[:12] for line in said] == ["3 of 3 rows,"] * len(ODD)
