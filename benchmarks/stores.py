"""Burnish beside the usual way of opening tokenized rows: `python benchmarks/stores.py [rows=500000] [formats=parquet,arrow,jsonl]`.

The usual way is what trainers do: `datasets` loads the files (`load_dataset`; `Dataset.from_file` for Arrow), and a Python
function turns each row once into a dict of `input_ids`, `loss_mask` and `num_actions`, looking at every value on the way.
No verdict is kept, so the next start does it again, with `datasets`' own cache in place. Memory is given twice: when each
dict is let go at once, and when all are kept in a list, as trainers do that hand a list of rows to their data loader.

Burnish converts (all but Arrow), checks every value, counts targets, and keeps lengths, counts and the verdict.
The plain pass that its check of Arrow is compared with maps the same files and asks numpy for the least and the greatest
id, the least and the greatest mask value, and the sum of each row's mask; it keeps and names nothing.

Each number is of a fresh process, after its imports, files in the page cache. CPU seconds are those of the process and
its children, memory is the peak of their anonymous memory together, libraries included. At full size it takes a quarter
of an hour, 12 GB of memory and 8 GB of temporary files.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS, SHARDS = 500_000, 8
VOCABULARY = 151_936
MEAN_LENGTH, SPREAD = 348, 0.9
"""Of the lognormal lengths: 174 M tokens in 500,000 rows, 870 MB as int32 ids and int8 masks."""
DRAWN, DRAWS = 64, 1000
SUFFIXES = {"Parquet zstd": "parquet", "Arrow stream": "arrow", "JSON lines": "jsonl"}
LARGE_BATCHES = "Arrow stream of batches of 10,000 rows"


def write_stores(folder: Path, rows: int) -> None:
    """The same rows in every format, the same ones each time."""
    random = np.random.default_rng(0)
    for name in (*SUFFIXES, LARGE_BATCHES):
        (folder / name).mkdir()
    for shard, count in enumerate(np.diff(np.linspace(0, rows, SHARDS + 1, dtype=int))):
        parquet, arrow, jsonl = (folder / name / f"part-{shard}.{suffix}" for name, suffix in SUFFIXES.items())
        tables = [make_table(random, min(10_000, count - start)) for start in range(0, count, 10_000)]
        pq.write_table(pa.concat_tables(tables), parquet, compression="zstd", row_group_size=10_000)
        schema, large = tables[0].schema, folder / LARGE_BATCHES / arrow.name
        with (
            pa.ipc.new_stream(str(arrow), schema) as stream,
            pa.ipc.new_stream(str(large), schema) as large_stream,
            jsonl.open("w") as lines,
        ):
            for table in tables:
                stream.write_table(table, max_chunksize=1000)  # as `datasets` writes
                large_stream.write_table(table)
                lines.writelines(json.dumps(row) + "\n" for row in table.to_pylist())


def make_table(random: np.random.Generator, rows: int) -> pa.Table:
    """Rows with common and rare tokens, whose last part is trained."""
    sizes = random.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, rows)
    lengths = np.clip(sizes, 4, 16_384).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = (VOCABULARY * random.random(offsets[-1], dtype=np.float32) ** 3).astype(np.int32)
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = (places >= np.repeat((lengths * random.uniform(0.2, 0.8, rows)).astype(np.int64), lengths)).astype(np.int8)
    lists = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values) for values in (ids, mask)]
    return pa.table(lists, names=["input_ids", "loss_mask"])


class Usual:
    """`datasets` and a Python function."""

    def __init__(self, store: Path, cache: Path):
        import datasets

        datasets.disable_progress_bars()
        self._datasets, self._store, self._cache = datasets, store, cache

    def load(self):
        files = sorted(map(str, self._store.iterdir()))
        if self._store.name == "Arrow stream":
            self._rows = self._datasets.concatenate_datasets([self._datasets.Dataset.from_file(f) for f in files])
        else:
            kind = "json" if self._store.name == "JSON lines" else "parquet"
            self._rows = self._datasets.load_dataset(kind, data_files=files, cache_dir=str(self._cache), split="train")

    def prepare(self):
        for row in self._rows:
            normalise(row)

    def keep(self):
        self.kept = [normalise(row) for row in self._rows]

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        row = normalise(self._rows[index])
        return row["input_ids"], row["loss_mask"]


def normalise(row):
    """What a trainer makes of a row."""
    ids, mask = row["input_ids"], row["loss_mask"]
    if len(ids) != len(mask) or min(ids) < 0 or max(ids) >= VOCABULARY or not set(mask) <= {0, 1}:
        raise ValueError("a row is not what a store holds")
    return {"input_ids": ids, "loss_mask": mask, "num_actions": len(mask) - mask.index(1) if 1 in mask else 0}


class Burnish:
    """`open_store`."""

    def __init__(self, store: Path, cache: Path):
        from burnish.data.store import open_store

        self._open, self._store, self._cache = open_store, store, cache

    def load(self, **options):
        self._rows = self._open(self._store, name="rows", num_embeddings=VOCABULARY, cache_dir=self._cache, **options)

    def prepare(self):
        """Nothing is left to do."""

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        row = self._rows[index]
        return row.input_ids, row.loss_mask


def used() -> np.ndarray:
    """CPU and wall seconds so far."""
    return np.array([sum(os.times()[:4]), time.perf_counter()])


def measure_open(reader) -> dict[str, float]:
    """Seconds until the rows can be trained on, those of loading alone, and those of a draw."""
    begin = used()
    reader.load()
    loaded = used() - begin
    reader.prepare()
    ready = used() - begin
    names = ("load cpu", "load wall", "cpu", "wall")
    return {**dict(zip(names, [*loaded, *ready], strict=True)), "draw": measure_draws(reader)}


def measure_draws(reader) -> float:
    """Seconds to read random rows into one array, the median of so many draws that most find their pages mapped."""
    random, seconds = np.random.default_rng(1), []
    for _ in range(DRAWS):
        chosen = random.integers(0, len(reader), DRAWN).tolist()
        begin = time.perf_counter()
        rows = [reader[index] for index in chosen]
        packed = np.empty((2, sum(len(ids) for ids, _ in rows)), np.int64)
        start = 0
        for ids, mask in rows:
            stop = start + len(ids)
            packed[0, start:stop], packed[1, start:stop] = ids, mask
            start = stop
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds))


def measure_check(reader: Burnish) -> dict[str, float]:
    """CPU seconds of opening Arrow anew and of a plain pass, in turn; the least of each."""
    plain, check = [], []
    for _ in range(9):
        begin = time.process_time()
        plain_pass(reader._store)
        middle = time.process_time()
        reader.load(force_recache=True)
        plain.append(middle - begin)
        check.append(time.process_time() - middle)
    return {"plain": min(plain), "check": min(check)}


def plain_pass(store: Path) -> int:
    """Targets in the files; every value is looked at once."""
    targets = 0
    for file in sorted(store.iterdir()):
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                starts = batch.column("input_ids").offsets.to_numpy()[:-1]
                ids, mask = (batch.column(name).values.to_numpy() for name in ("input_ids", "loss_mask"))
                if ids.min() < 0 or ids.max() >= VOCABULARY or mask.min() < 0 or mask.max() > 1:
                    raise ValueError("a row is not what a store holds")
                targets += int(np.add.reduceat(mask, starts, dtype=np.int64).sum())
    return targets


def measure(what: str, side: str, store: Path, cache: Path) -> dict[str, float]:
    """What a fresh process measures, and the peak of its anonymous memory and its children's, bytes."""
    command = [sys.executable, __file__, what, side, str(store), str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            peak = max(peak, sum(anonymous_bytes(pid) for pid in family(process.pid)))
            time.sleep(0.005)
        if process.returncode:
            raise SystemExit(process.returncode)
        return {**json.loads(process.stdout.read()), "memory": peak}


def family(pid: int) -> list[int]:
    """The process and its children's children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def anonymous_bytes(pid: int) -> int:
    """None of a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def measured(folder: Path, cache: Path, formats: list[str]) -> Iterator[tuple[str, list[float]]]:
    """Lines of the table: a name, and what it is for the usual way, for loading alone in it, and for Burnish."""
    for name in (name for name, suffix in SUFFIXES.items() if suffix in formats):
        usual, ours = (
            [measure("open", side, folder / name, cache / side / name) for _ in range(2)]
            for side in ("usual", "burnish")
        )
        kept = measure("keep", "usual", folder / name, cache / "usual" / name)
        for when, first, second in (("first", usual[0], ours[0]), ("again", usual[1], ours[1])):
            for unit in ("cpu", "wall"):
                yield f"{name}: open, {when}, {unit} s", [first[unit], first[f"load {unit}"], second[unit]]
        yield f"{name}: {DRAWN} random rows, ms", [usual[1]["draw"] * 1e3, np.nan, ours[1]["draw"] * 1e3]
        memory = [peak / 1e6 for peak in (usual[0]["memory"], kept["memory"], ours[0]["memory"])]
        yield f"{name}: memory, rows let go, MB", [memory[0], np.nan, memory[2]]
        yield f"{name}: memory, rows kept, MB", [memory[1], np.nan, memory[2]]
    for name in ("Arrow stream", LARGE_BATCHES):
        both = measure("check", "burnish", folder / name, cache / "check")
        yield f"{name}: a plain pass, and the check, cpu s", [both["plain"], np.nan, both["check"]]


def print_table(rows: int, formats: list[str]) -> None:
    """Write the stores, measure both sides, and print a Markdown table."""
    with tempfile.TemporaryDirectory() as place:
        folder, cache = Path(place) / "stores", Path(place) / "cache"
        folder.mkdir()
        write_stores(folder, rows)
        print(f"| {rows} rows | usual way | datasets alone | Burnish | times |\n| --- | --: | --: | --: | --: |")
        for name, (usual, alone, ours) in measured(folder, cache, formats):
            cells = [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in (usual, alone, ours)]
            times = f"{usual / ours:.3g}" if ours else ""
            print(f"| {name} | {' | '.join('' if cell == 'nan' else cell for cell in [*cells, times])} |", flush=True)


def main(arguments: list[str]) -> None:
    """Print the table, or in a process of its own measure one thing as JSON."""
    if len(arguments) != 4:
        settings = dict(argument.split("=") for argument in arguments)
        formats = settings.get("formats", ",".join(SUFFIXES.values())).split(",")
        print_table(int(settings.get("rows", ROWS)), formats)
        return
    what, side, store, cache = arguments
    reader = {"usual": Usual, "burnish": Burnish}[side](Path(store), Path(cache))
    if what == "keep":
        reader.load()
        reader.keep()
        print("{}")
    else:
        print(json.dumps({"open": measure_open, "check": measure_check}[what](reader)))


if __name__ == "__main__":
    main(sys.argv[1:])
