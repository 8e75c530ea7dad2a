"""Rows with images, written as shards in several formats."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.stores import write_arrow

PLACEHOLDER = 9


def pixels(patches: int, *, start: float = 0.0) -> list[list[float]]:
    """[patches, 2]; each value fits into half a float."""
    return [[start + patch / 4, patch / 8] for patch in range(patches)]


def text_row(length: int) -> dict:
    return {"input_ids": list(range(20, 20 + length)), "loss_mask": [0] + [1] * (length - 1)}


def image_row(length: int, *, grid=((1, 4, 4),), placeholders: int | None = None, start: float = 0.0) -> dict:
    """Placeholders from position 2 on; as many as ``grid`` stands for when two by two patches are merged."""
    patches = sum(time * height * width for time, height, width in grid)
    row = text_row(length)
    for position in range(2, 2 + (patches // 4 if placeholders is None else placeholders)):
        row["input_ids"][position] = PLACEHOLDER
    return row | {"pixel_values": pixels(patches, start=start), "image_grid_thw": [list(image) for image in grid]}


def write_images(folder: Path, rows: list[dict], *, kind: str, number: int = 0, floats: str = "float") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"part-{number:03d}.{'arrow' if kind.startswith('arrow') else kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file
    columns = {name: pa.array([row[name] for row in rows]) for name in ("input_ids", "loss_mask")}
    if any("pixel_values" in row for row in rows):
        grids = [row.get("image_grid_thw") for row in rows]
        columns["image_grid_thw"] = pa.array(grids, pa.list_(pa.list_(pa.int64())))
        values = [row.get("pixel_values") for row in rows]
        is_text = any(isinstance(patch[0], str) for value in values if value for patch in value if patch)
        leaf = pa.string() if is_text else pa.type_for_alias(floats)
        columns["pixel_values"] = pa.array(values, pa.list_(pa.list_(leaf)))
    table = pa.table(columns)
    if kind == "parquet":
        pq.write_table(table, file, row_group_size=3)
        return file
    return write_arrow(file, table, kind=kind, chunk=2)
