"""Stores that stand in a bucket, and what a cache holds of them."""

import tempfile
from pathlib import Path
from typing import Any

from burnish.data.store import open_store
from tests.data.stores import contents, write_shard
from tests.storage.servers import Bucket
from tests.toys import row


def marked(mark: int, count: int = 3) -> list[dict]:
    """Rows that all begin with ``mark``."""
    return [row([mark, number, 7], [0, 1, 1]) for number in range(count)]


def publish(bucket: Bucket, prefix: str, shards: list[list[dict]], *, kind: str = "parquet", **how: Any) -> str:
    """Put the rows of each shard below ``prefix``; returns the URI of the store."""
    with tempfile.TemporaryDirectory() as folder:
        for number, rows in enumerate(shards):
            write_shard(Path(folder), number, rows, kind=kind, **how)
        bucket.upload(Path(folder), prefix)
    return bucket.uri(prefix)


def rows_at(uri: str, **how: Any) -> list[tuple[list[int], list[int]]]:
    """What training would read there, ids and masks."""
    return contents(open_store(uri, name="tok", **how))


def pairs(rows: list[dict]) -> list[tuple[list[int], list[int]]]:
    return [(each["input_ids"], each["loss_mask"]) for each in rows]


def in_cache(cache: Path) -> list[str]:
    """Files that count: no part of their name is hidden."""
    files = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return sorted(str(path) for path in files if not any(part.startswith(".") for part in path.parts))
