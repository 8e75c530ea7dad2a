"""A Ray cluster of two nodes makes the very store that one process makes."""

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from burnish import SFTConfig, api
from burnish.data.manifest import MANIFEST_NAME
from burnish.data.tokenize import TokenizerSettings
from burnish.data.write import TokenizeJob
from burnish.errors import DataError, LaunchError
from burnish.launch import ray_data as on_ray
from tests.toys import T3, chat, write_jsonl

ROWS = [chat("q" * (i % 70), "" if i % 7 == 0 else f"a{i}") for i in range(1300)]
NODES = """
import json, sys
import ray
from burnish import SFTConfig, api
from burnish.errors import DataError

good, bad, out = json.loads(sys.argv[1])
api.tokenize(SFTConfig(**good), out=out)
found = {"left": ray.is_initialized()}
ray.init(log_to_driver=False)
try:
    api.tokenize(SFTConfig(**bad), out=f"{out}-bad")
except DataError as error:
    found["error"] = str(error)
found["kept"] = ray.is_initialized()
workers = [a for a in ray._private.state.actors().values() if "MapWorker" in a["ActorClassName"]]
found["nodes"] = len({a["Address"]["NodeID"] for a in workers})
ray.shutdown()
print(json.dumps(found))
"""


@pytest.fixture
def keys_of(tmp_path, model_dir):
    def make(name, rows):
        file = write_jsonl(tmp_path / name, rows)
        return {"model": {"path": str(model_dir)}, "train_datasets": [str(file)], "num_workers": 0, "max_length": 80}

    return make


@pytest.fixture
def job_of(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(rows, model=model_dir, **settings):
        write_jsonl(tmp_path / "rows.jsonl", rows)
        return TokenizeJob(
            "rows.jsonl",
            {
                "split": None,
                "tokenizer_settings": TokenizerSettings(str(model), **settings),
                "messages_key": None,
                "tools_key": None,
                "system_key": None,
                "num_workers": 0,
                "cache_dir": None,
                "force_recache": False,
                "disable_cache": False,
            },
        )

    return make


def new(folder):
    folder.mkdir()
    return folder


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_two_nodes_write_the_same_bytes_and_name_the_same_row(tmp_path, keys_of, two_nodes):
    good = keys_of("rows.jsonl", ROWS)
    bad = keys_of("bad.jsonl", [*ROWS[:700], {"messages": 5}, *ROWS[700:], {"messages": 6}])
    script = tmp_path / "nodes.py"
    script.write_text(NODES)
    given = [{**good, "launcher": "ray"}, {**bad, "launcher": "ray"}, str(tmp_path / "there")]
    result = subprocess.run(
        [sys.executable, str(script), json.dumps(given)],
        env=two_nodes,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    api.tokenize(SFTConfig(**good), out=str(tmp_path / "here"))
    here = content(tmp_path / "here")
    assert sorted(here) == [MANIFEST_NAME, *(f"rows-0000{i}.arrow" for i in range(3))]
    assert content(tmp_path / "there") == here
    with pytest.raises(DataError, match=r"row 700 .*bad.jsonl, line 701") as error:
        api.tokenize(SFTConfig(**bad), out=str(tmp_path / "bad"))
    assert found == {"left": False, "kept": True, "nodes": 2, "error": str(error.value)}
    assert not (tmp_path / "there-bad").exists()


def test_files_travel_in_pieces(tmp_path, job_of, monkeypatch):
    monkeypatch.setattr(on_ray, "PIECE_BYTES", 1000)
    job = job_of(ROWS[1:20] + [chat("q", "")] * 5)
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    tasks = [(0, 7, tmp_path / "there" / "a"), (19, 24, tmp_path / "there" / "b"), (7, 19, tmp_path / "there" / "c")]
    worker = on_ray._Worker([])
    worker._writer = job.writer
    items = [{"start": start, "stop": stop, "name": file.name} for start, stop, file in tasks]
    replies = [
        reply for item in items for table in worker(on_ray.pa.Table.from_pylist([item])) for reply in table.to_pylist()
    ]
    assert len(replies) > 6
    shards = list(on_ray._received(iter(replies), tasks))
    assert shards == [job.writer.write((start, stop, tmp_path / "here" / file.name)) for start, stop, file in tasks]
    assert content(tmp_path / "there") == content(tmp_path / "here")


def test_a_node_needs_the_rows_and_no_file_of_the_model(tmp_path, job_of, model_dir):
    template = tmp_path / "template.jinja"
    template.write_text(T3)
    model = shutil.copytree(model_dir, tmp_path / "model")
    job = job_of(ROWS[:20], model=model, chat_template=str(template))
    order = on_ray.make_order(job, fast=False)
    assert "model.safetensors" not in order.tokenizer
    here = job.writer.write((0, 20, tmp_path / "a.arrow"))
    template.unlink()
    shutil.rmtree(model)
    assert on_ray.open_order(order, new(tmp_path / "node")).write((0, 20, tmp_path / "node" / "a.arrow")) == here
    assert here.rows == 17


def test_a_node_without_the_rows_is_named(tmp_path, job_of):
    order = on_ray.make_order(job_of(ROWS[:20]), fast=False)
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=f"rows.jsonl: is not on node {platform.node()}") as error:
        on_ray.open_order(order, tmp_path)
    assert "every node" in error.value.fix


def test_a_node_with_other_rows_or_tokens_is_refused(tmp_path, job_of):
    order = on_ray.make_order(job_of(ROWS[:20]), fast=False)
    with pytest.raises(DataError, match="would become other tokens on node"):
        on_ray.open_order(replace(order, key="other"), new(tmp_path / "a"))
    write_jsonl(tmp_path / "rows.jsonl", ROWS[:19])
    with pytest.raises(DataError, match="is another dataset on node"):
        on_ray.open_order(order, new(tmp_path / "b"))


def test_without_the_extra_its_name_is_said(tmp_path, keys_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install 'burnish\[ray\]'"):
        api.tokenize(SFTConfig(**keys_of("rows.jsonl", ROWS[:3]), launcher="ray"), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
