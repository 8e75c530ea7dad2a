"""Every command and every piece of code in the docs works as it stands there.

A page is run from top to bottom in a folder that holds ``my-model``, ``chats.jsonl``, ``heldout.jsonl``, ``alpaca.jsonl`` and the
``run.yaml`` of the quickstart, which makes such files itself, larger ones, in a folder that it goes to. A block with a title is a
file of the folder; a ``text`` block is what the command before it says.
What cannot run here is named below, with the reason, and is read by the parser that would read it.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from burnish import SFTConfig, SFTTrainer
from burnish.bench.measure import BUILT_IN
from burnish.cli.main import COMMANDS, main
from burnish.config import Purpose, find_problems, load_config
from tests.house.pages import PAGES, Command, blocks, files
from tests.house.source import ROOT
from tests.storage.servers import Bucket
from tests.toys import chat, row, save_model, write_jsonl

QUICKSTART, LAUNCHING = ROOT / "docs/quickstart.md", ROOT / "docs/launching.md"
EXCUSED = {
    r"make ": "the gate runs quickstart and test in a clean checkout (.ci/run)",
    r"torchrun ": "needs two machines; tests/runs/test_ranks.py and test_megatron.py run torchrun on one",
    r".*launcher=ray": "needs a cluster; tests/launch/test_ray.py and test_ray_data.py start one",
    r"burnish train .*placement\.num_gpus_per_node=[48]": "needs as many GPUs; tests/parity and tests/runs use 2 to 4 processes",
    r".*examples/images/images\.yaml": "needs what make images makes; tests/runs/test_images.py runs it",
    r"burnish bench compare=trl": "takes minutes; tests/bench/test_bench.py measures both sides of a small one",
    r"burnish train run\.yaml +# every GPU": "starts as many processes as there are GPUs; the line is run on other pages",
}
"""What begins so is not run, and why."""
STAND_INS = {
    "Qwen/": "model.path=my-model",
    "yahma/": "train_datasets=chats.jsonl",
    "['train[:100]']": "train_dataset_splits=train[:8]",
}
"""No test reaches the hub: in a command that names it, these words come last, and the last word of a key counts."""

PROGRAMS = {"python": sys.executable, "mkdir": "mkdir", "cp": "cp"}
"""What a page runs beside ``burnish`` and ``cd``."""


def excuse(command: Command) -> str:
    """The pattern of EXCUSED that a command is under, or nothing."""
    return next((pattern for pattern in EXCUSED if re.match(pattern, command.line)), "")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """What all pages begin with, and their cache."""
    folder = tmp_path_factory.mktemp("documented")
    save_model(folder / "my-model")
    chats = [chat(f"What is {n} and {n}?", f"It is {2 * n}.", "Sure?", "Yes.") for n in range(24)]
    write_jsonl(folder / "chats.jsonl", chats)
    write_jsonl(folder / "heldout.jsonl", [chat(f"And {n}?", f"{n}.") for n in range(4)])
    alpaca = [{"instruction": f"Count to {n}.", "input": "", "output": f"1 to {n}"} for n in range(24)]
    write_jsonl(folder / "alpaca.jsonl", alpaca)
    (folder / "run.yaml").write_text(files(QUICKSTART)["run.yaml"])
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("model"))
    return folder


@pytest.fixture
def place(shared, tmp_path, monkeypatch) -> Path:
    """The folder of one page."""
    for file in shared.iterdir():
        if file.name != "cache":
            (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BURNISH_CACHE", str(shared / "cache"))
    for name in ("order", "stop"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# peft asks transformers in an older way, at the docs' PeftModel.from_pretrained
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_from_top_to_bottom(page, place, request, capsys, monkeypatch):
    if any("s3://my-bucket" in block.text for block in blocks(page)):
        server = request.getfixturevalue("s3_bucket").server
        Bucket("s3", server, "my-bucket").put("made", b"with its first object")
    said = ""
    for block in blocks(page):
        if block.title:
            Path(block.title).unlink(missing_ok=True)
            Path(block.title).write_text(block.text)
        if block.language == "python" and not block.title:
            exec(compile(block.text, page.name, "exec"), {"__name__": "documented"})
        if block.language == "text" and not block.title:
            assert [line for line in block.text.splitlines() if line not in said] == [], said
        for command in (command for command in block.commands() if not excuse(command)):
            if command.words[0] == "cd":
                monkeypatch.chdir(command.words[1])
                continue
            if program := PROGRAMS.get(command.words[0]):
                subprocess.run([program, *command.words[1:]], check=True)
                continue
            status = main(command.words[1:] + [word for name, word in STAND_INS.items() if name in command.line])
            said = "\n".join(capsys.readouterr())
            assert (command.words[0], status) == ("burnish", command.status), f"{command.line}\n{said}"


ALL = [command for page in PAGES for block in blocks(page) for command in block.commands()]


@pytest.mark.parametrize("command", [c for c in ALL if excuse(c)], ids=lambda command: command.line[:60])
def test_what_is_not_run_is_read(command, place):
    words = [word for word in command.words if not word.startswith("RAY_ADDRESS=")]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    if words[0] == "torchrun":
        words = torchrun(words)
    assert problems_of(words[1:]) == []


def torchrun(words: list[str]) -> list[str]:
    """The ``burnish`` command that torchrun would start, read by its own parser."""
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(words[1:])
    assert read.module
    assert read.shutdown_timeout > 30
    return [read.training_script, *read.training_script_args]


def problems_of(words: list[str]) -> list:
    """What is wrong with the config of a command; a name after it that is a file is its RUN.yaml."""
    command, *rest = words
    keys = [word for word in rest if "=" in word and word.partition("=")[0] not in COMMANDS[command].own]
    named = [Path(word) for word in rest if "=" not in word]
    purposes = {"tokenize": Purpose.TOKENIZE, "eval": Purpose.EVALUATE, "bench": Purpose.BENCH}
    purpose = purposes.get(command, Purpose.TRAIN)
    if purpose == Purpose.BENCH:
        keys.insert(0, f"model.path={BUILT_IN}")
    config = load_config(named[0] if named else None, keys, purpose=purpose)
    return find_problems(config, environment={}, purpose=purpose)


def test_every_excuse_is_needed():
    assert {excuse(command) for command in ALL} - {""} == set(EXCUSED)


def test_the_batch_script_of_slurm(place):
    script = files(LAUNCHING)["train.sbatch"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert re.findall(r"^#SBATCH --(\S+)$", script, re.MULTILINE)
    [line] = [line for line in script.replace("\\\n", "").splitlines() if line.startswith("srun ")]
    assert problems_of(line.partition(" burnish ")[2].split()) == []


def test_the_job_of_kubernetes(place):
    service, job = yaml.safe_load_all(files(LAUNCHING)["train.k8s.yaml"])
    pod = job["spec"]["template"]["spec"]
    assert [service["kind"], job["kind"]] == ["Service", "Job"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (line,) = pod["containers"][0]["args"]
    words = torchrun(line.replace("$JOB_COMPLETION_INDEX", "0").split()[1:])
    assert problems_of(words[1:]) == []
    assert pod["terminationGracePeriodSeconds"] > int(re.search(r"--shutdown-timeout (\d+)", line)[1])


def test_json_in_the_docs_is_json():
    for page in PAGES:
        for block in blocks(page):
            if block.language == "json":
                json.loads(block.text)


def test_the_sampler_and_the_callback_of_the_docs(place):
    for page in ("samplers", "callbacks"):
        for name, text in files(ROOT / f"docs/{page}.md").items():
            (place / name).write_text(text)
    rows = [row(list(range(3, 3 + n)), [0] + [1] * (n - 1)) for n in (9, 2, 5, 7)]
    store = str(write_jsonl(place / "store.jsonl", rows))
    config = SFTConfig(
        model={"path": "my-model"},
        pretokenized_dataset_paths=[store],
        eval_pretokenized_dataset_paths=[store],
        eval_dataset_names=["heldout"],
        eval_interval=6,
        sampler="custom",
        sampler_class_path="order.ShortFirst",
        callbacks=[{"stop.StopWhenGood": {"loss": 100.0}}],
        batch_size=1,
        num_steps=100,
    )
    assert SFTTrainer(config).train().step == 6, "the callback stops at the first evaluation"
    lines = (place / "runs" / "sft" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/num_tokens"] for line in lines] == [2, 5, 7, 9, 9, 2]
