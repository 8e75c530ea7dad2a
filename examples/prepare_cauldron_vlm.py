"""Rows of The Cauldron -> DIR/train.parquet and DIR/heldout.parquet: chat rows with images.

    python examples/prepare_cauldron_vlm.py vqav2 --rows 2000 --heldout 200 --out data/vqav2

The first word is a subset of HuggingFaceM4/the_cauldron, or a Parquet file or folder of the same columns: ``images``, and
``texts`` with ``user`` and ``assistant``. Images are kept as they are; the first question of a row is asked of all of them.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Image, List, load_dataset

DATASET = "HuggingFaceM4/the_cauldron"
PART = pa.struct([("type", pa.string()), ("text", pa.string())])
SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(PART))]))),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ]
)
ROWS_A_GROUP = 64


def open_rows(source: str) -> Iterable[dict]:
    """Rows with images as bytes, one by one: a hub dataset is not fetched whole."""
    place = Path(source)
    if place.exists():
        files = sorted(map(str, place.rglob("*.parquet"))) if place.is_dir() else [str(place)]
        rows = load_dataset("parquet", data_files=files, split="train", streaming=True)
    else:
        rows = load_dataset(DATASET, source, split="train", streaming=True)
    return rows.cast_column("images", List(Image(decode=False)))


def chat_row(row: dict) -> dict:
    """The conversation of ``row``, with a part for each image before its first question."""
    parts = [{"type": "image", "text": None} for _ in row["images"]]
    messages = []
    for turn in row["texts"]:
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": turn["user"].strip()}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn["assistant"].strip()}]})
        parts = []
    return {"messages": messages, "images": row["images"]}


def write(file: Path, rows: Iterator[dict], number: int) -> int:
    """Write the next ``number`` of ``rows``; returns how many there were."""
    written = 0
    with pq.ParquetWriter(file, SCHEMA) as writer:
        while group := list(islice(rows, min(ROWS_A_GROUP, number - written))):
            writer.write_table(pa.Table.from_pylist(list(map(chat_row, group)), schema=SCHEMA))
            written += len(group)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a subset such as vqav2, or a Parquet file or folder")
    parser.add_argument("--rows", type=int, default=2000, help="rows to train on")
    parser.add_argument("--heldout", type=int, default=200, help="rows to evaluate on; the first ones")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows = iter(open_rows(given.source))
    for name, number in (("heldout", given.heldout), ("train", given.rows)):
        print(f"{given.out / name}.parquet: {write(given.out / f'{name}.parquet', rows, number)} rows")


if __name__ == "__main__":
    main()
