"""Damaged files: cut anywhere, or with a bit flipped anywhere. Never a crash, a hang, or wrong rows that could be told."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.data.store import open_store
from burnish.errors import BurnishError
from tests.data.stores import contents, write_shard

ROWS = [
    {"input_ids": list(range(1, 2 + n % 7)), "loss_mask": [0] + [1] * (n % 7), "note": "x" * n} for n in range(1, 60)
]
WHOLE = [(row["input_ids"], row["loss_mask"]) for row in ROWS if sum(row["loss_mask"][1:])]
FORMATS = {
    # Kind of file, and whether a flipped bit of its rows can be told from a right one.
    "parquet": True,  # written with checksums of its pages
    "jsonl.gz": True,
    "arrow file": False,
    "arrow stream": False,
    "arrow lz4": False,
    "jsonl": False,
    "json array": False,
}
DAMAGES = 150


def damaged(data: bytes, number: int) -> bytes:
    draw = random.Random(number)
    at = draw.randrange(len(data))
    if number % 3 == 0:
        return data[:at]
    flipped = bytearray(data)
    flipped[at] ^= 1 << draw.randrange(8)
    return bytes(flipped)


def read(folder: Path) -> tuple[str, list]:
    """The error, or the rows."""
    try:
        return "", contents(open_store(folder, name="x", num_embeddings=100, cache_dir=folder.parent / "cache"))
    except BurnishError as error:
        return str(error), []


def look_at_all(folder: Path, kind: str) -> None:
    """What the child process does: it says which damage it looks at, so that a crash has a number."""
    file = write_shard(folder, 0, ROWS, kind=kind)
    data = file.read_bytes()
    for number in range(DAMAGES):
        print(number, flush=True)
        file.write_bytes(damaged(data, number))
        said, rows = read(folder)
        assert str(folder) in said or not said, said
        if said:
            continue
        lines_cut = kind == "jsonl" and number % 3 == 0 and rows == WHOLE[: len(rows)]
        assert rows == WHOLE or lines_cut or not (FORMATS[kind] or number % 3 == 0), f"{number}: wrong rows"
        assert all(0 <= token < 100 for ids, _ in rows for token in ids)
        assert all(set(mask) <= {0, 1} and len(mask) == len(ids) for ids, mask in rows)


@pytest.mark.parametrize("kind", FORMATS)
def test_damage_is_an_error_or_no_matter(kind, tmp_path):
    code = f"from tests.data.test_fuzz import *\nlook_at_all(Path({str(tmp_path / 'store')!r}), {kind!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"damage {done.stdout.split()[-1:]}: {done.stderr[-2000:]}"
    assert len(done.stdout.split()) == DAMAGES
