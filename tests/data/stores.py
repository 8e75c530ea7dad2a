"""Rows written as shards in every format that is read, and read back the slow, obvious way."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import zstandard

from burnish.data.formats import find_shards
from burnish.storage.files import list_files
from burnish.storage.transfer import fetch

KINDS = ["parquet", "jsonl", "json array", "jsonl.gz", "jsonl.zst", "arrow file", "arrow stream", "arrow lz4"]
NUM_EMBEDDINGS = 100


def to_table(rows, *, ids="int64", mask="int64", lists="list"):
    """The rows as Arrow: ``lists`` is list, large_list, or dictionary (a list of coded integers)."""
    columns = {}
    for name, kind in (("input_ids", ids), ("loss_mask", mask)):
        element = pa.bool_() if kind == "bool" else pa.type_for_alias(kind)
        values = [[bool(v) for v in r[name]] if kind == "bool" else r[name] for r in rows]
        if lists == "dictionary" and kind != "bool":
            flat = pa.array([v for row in values for v in row], element).dictionary_encode()
            offsets = [sum(map(len, values[:i])) for i in range(len(values) + 1)]
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)
        else:
            make = pa.large_list if lists == "large_list" else pa.list_
            columns[name] = pa.array(values, make(element))
    return pa.table(columns)


def write_shard(folder: Path, number: int, rows, *, kind: str, chunk: int = 3, **types) -> Path:
    """Shard ``number`` of the store in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = {"json array": "json", "arrow file": "arrow", "arrow stream": "arrow", "arrow lz4": "arrow"}.get(
        kind, kind
    )
    file = folder / f"part-{number:03d}.{suffix}"
    if "json" in kind:
        lines = [json.dumps(row) for row in rows]
        text = f"[{', '.join(lines)}]" if kind == "json array" else "".join(line + "\n" for line in lines)
        pack = {"jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}.get(kind, bytes)
        file.write_bytes(pack(text.encode()))
    elif kind == "parquet":
        pq.write_table(to_table(rows, **types), file, row_group_size=max(1, chunk), write_page_checksum=True)
    else:
        write_arrow(file, to_table(rows, **types), kind=kind, chunk=chunk)
    return file


def write_arrow(file: Path, table: pa.Table, *, kind: str = "arrow file", chunk: int = 3) -> Path:
    new = pa.ipc.new_stream if kind == "arrow stream" else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression="lz4" if kind == "arrow lz4" else None, unify_dictionaries=True)
    with new(str(file), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return file


def expected(rows, *, max_length=None, drop_long=False):
    """Kept rows (number, ids, mask) and how many were dropped for what."""
    kept, dropped = [], {"too_long": 0, "no_target": 0}
    for number, row in enumerate(rows):
        ids, mask = row["input_ids"], row["loss_mask"]
        if drop_long and max_length is not None and len(ids) > max_length:
            dropped["too_long"] += 1
            continue
        ids, mask = ids[:max_length], mask[:max_length]
        if sum(mask[1:]) == 0:
            dropped["no_target"] += 1
            continue
        kept.append((number, ids, mask))
    return kept, {reason: n for reason, n in dropped.items() if n}


def shards_of(path: Path):
    """The shards of a local store."""
    return find_shards(str(path), files=list_files(path), fetch=fetch)


def contents(store):
    return [(e.input_ids.tolist(), e.loss_mask.tolist()) for e in (store[i] for i in range(len(store)))]
