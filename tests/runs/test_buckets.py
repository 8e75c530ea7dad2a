"""The real command line on s3:// and gs:// URIs: each start says what it did, and trains the right rows."""

import json
import signal
import threading
import time

import pytest

from burnish.api import load_from_pretokenized
from tests.data.stores import contents
from tests.runs.commands import burnish, metrics, start
from tests.storage.faults import after
from tests.storage.published import marked, pairs, publish
from tests.toys import chat, save_model, save_tokenizer, write_jsonl

SHARDS = [marked(10 + number, 4) for number in range(6)]


def run(command, uri, model, folder, *more):
    keys = (f"model.path={model}", f"pretokenized_dataset_paths={uri}", "sampler=sequential", "num_steps=3", *more)
    done = burnish(command, *keys, folder=folder)
    assert done.returncode == 0, done.stderr
    return done


def test_check_train_killed_again_and_replaced(s3_bucket, model_dir, tmp_path, faulty):
    uri = publish(s3_bucket, "tok", SHARDS)
    report = json.loads(run("check", uri, model_dir, tmp_path, "--json", "cache_dir=other").stdout)
    assert (report["sources"][0]["rows"], report["steps_per_epoch"]) == (24, 6)

    released = threading.Event()
    faulty.on("get", after(released.wait), where=lambda request: request.key >= "tok/part-003")
    keys = (f"model.path={model_dir}", f"pretokenized_dataset_paths={uri}", "sampler=sequential", "num_steps=3")
    process = start("train", *keys, folder=tmp_path)
    while len(list((tmp_path / "cache" / "objects").rglob("*.parquet"))) < 3:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "runs" / "sft" / "metrics.jsonl").exists()
    faulty.heal()
    released.set()

    first = run("train", uri, model_dir, tmp_path)
    assert f"{uri}: fetching 3 of 6" in first.stderr, "what the killed one had is not fetched again"
    losses = metrics(tmp_path)
    publish(s3_bucket, "tok", [marked(90, 4)])
    replaced = run("train", uri, model_dir, tmp_path)
    assert "fetching 1 of 6 objects" in replaced.stderr
    assert "5 are unchanged" in replaced.stderr
    assert metrics(tmp_path)[1]["train/loss"] != losses[1]["train/loss"], "step 1 trains the replaced shard"
    wanted = pairs([row for shard in [marked(90, 4), *SHARDS[1:]] for row in shard])
    assert contents(load_from_pretokenized(uri, cache_dir=str(tmp_path / "cache"))) == wanted


def test_model_rows_and_eval_set_in_buckets_train_as_from_disk(s3_bucket, model_dir, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(8)])
    s3_bucket.put("raw/rows.jsonl", file.read_bytes())
    s3_bucket.upload(model_dir, "model")
    for name, model, rows in (
        ("disk", model_dir, file),
        ("bucket", s3_bucket.uri("model"), s3_bucket.uri("raw/rows.jsonl")),
    ):
        keys = (f"model.path={model}", f"train_datasets={rows}", f"eval_datasets={rows}", f"run_name={name}")
        done = burnish("train", *keys, "num_steps=2", "num_workers=0", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    disk, bucket = metrics(tmp_path, "disk"), metrics(tmp_path, "bucket")
    for key in ("train/loss", "eval/rows.jsonl/loss"):
        assert bucket[2][key] == disk[2][key]


def test_tokenized_into_a_bucket_and_trained_from_there(s3_bucket, model_dir, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [chat(f"question {n}", f"answer {n}") for n in range(8)])
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    uri = s3_bucket.uri("made/tok")
    keys = (f"model.path={model_dir}", f"train_datasets={file}", "num_workers=0", f"out={uri}")
    done = burnish("tokenize", *keys, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{uri}\n"), done.stderr
    assert s3_bucket.keys("made") == ["made/tok/_burnish_manifest.json", "made/tok/rows-00000.arrow"]
    raw = burnish("train", *keys[:3], "num_steps=2", "run_name=raw", folder=tmp_path)
    assert raw.returncode == 0, raw.stderr
    run("train", uri, model_dir, tmp_path, "sampler=random", "num_steps=2")
    assert metrics(tmp_path)[2]["train/loss"] == metrics(tmp_path, "raw")[2]["train/loss"]
    stats = burnish("inspect", "stats", uri, folder=tmp_path)
    assert "8 of 8 rows" in stats.stdout
    assert "tokenizer_hash" in stats.stdout
    again = burnish("tokenize", *keys, folder=tmp_path)
    assert (again.returncode, "is not empty" in again.stderr) == (2, True)


def test_a_store_of_another_model_is_refused_before_a_row_is_fetched(s3_bucket, model_dir, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [chat("q", "a")])
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    uri = s3_bucket.uri("tok")
    keys = (f"model.path={model_dir}", f"train_datasets={file}", "num_workers=0", f"out={uri}")
    assert burnish("tokenize", *keys, folder=tmp_path).returncode == 0
    other = save_model(tmp_path / "other")
    save_tokenizer(other, template="{{ messages[0]['content'] }}")
    done = burnish("train", f"model.path={other}", f"pretokenized_dataset_paths={uri}", "num_steps=1", folder=tmp_path)
    assert done.returncode == 2
    assert f"{uri}: was tokenized for another model: template_hash" in done.stderr
    assert not list((tmp_path / "cache").rglob("*.arrow"))


@pytest.mark.parametrize("scheme", ["gs", "gcs"])
def test_google_stores_load_by_both_names(google_bucket, tmp_path, scheme):
    publish(google_bucket, "tok", SHARDS)
    store = load_from_pretokenized(f"{scheme}://{google_bucket.name}/tok", cache_dir=str(tmp_path))
    assert contents(store) == pairs([row for shard in SHARDS for row in shard])
