"""B30: many processes on one cold cache, one of them killed, and all asked to fetch anew."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.faults import delay
from tests.storage.published import in_cache, marked, pairs, publish

NUM_SHARDS = 24
SHARDS = [marked(number, 2) for number in range(NUM_SHARDS)]
ROWS = [list(pair) for shard in SHARDS for pair in pairs(shard)]
READ = """
import json, sys
from burnish.data.store import open_store
from tests.data.stores import contents
store = open_store(sys.argv[1], name="tok", force_recache=sys.argv[2] == "force")
print("open", flush=True)
sys.stdin.readline()
print(json.dumps(contents(store)))
"""


@pytest.fixture
def start():
    """Open the store in a process, which reads its rows when it gets a line."""
    started = []

    def run(uri: str, how: str = "plain") -> subprocess.Popen:
        command = [sys.executable, "-c", READ, uri, how]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def opened(process: subprocess.Popen) -> bool:
    return process.stdout.readline() == "open\n"


def rows(process: subprocess.Popen) -> list:
    out, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    return json.loads(out)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_four_processes_fetch_once(s3_bucket, faulty, start):
    uri = publish(s3_bucket, "tok", SHARDS)
    faulty.on("get", delay(0.2))
    processes = [start(uri) for _ in range(4)]
    assert all([opened(process) for process in processes])
    assert [rows(process) for process in processes] == [ROWS] * 4
    assert faulty.sent == {key: len(s3_bucket.get(key)) for key in s3_bucket.keys("tok")}


def test_one_is_killed_in_mid_download(s3_bucket, faulty, start):
    """What it had whole is not fetched again, what it had in part counts as nothing."""
    uri, cache = publish(s3_bucket, "tok", SHARDS), Path(os.environ["BURNISH_CACHE"])
    faulty.on("get", delay(0.2))
    killed = start(uri)
    wait_until(lambda: len(faulty.sent) >= NUM_SHARDS // 2)
    survivors = [start(uri) for _ in range(3)]
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert in_cache(cache) == []
    whole = [path.name for path in cache.rglob("part-*.parquet")]
    assert all([opened(process) for process in survivors])
    assert [rows(process) for process in survivors] == [ROWS] * 3
    sizes = {key: len(s3_bucket.get(key)) for key in s3_bucket.keys("tok")}
    assert whole
    assert {name: faulty.sent[f"tok/{name}"] for name in whole} == {name: sizes[f"tok/{name}"] for name in whole}
    assert all(faulty.sent[key] in (size, 2 * size) for key, size in sizes.items())
    before = faulty.count("get")
    late = start(uri)
    assert opened(late)
    assert rows(late) == ROWS
    assert faulty.count("get") == before


def test_all_fetch_anew_and_nobody_loses_what_it_has_mapped(s3_bucket, faulty, start):
    uri = publish(s3_bucket, "tok", SHARDS)
    faulty.on("get", delay(0.05))
    first = start(uri)
    assert opened(first)
    forced = [start(uri, "force") for _ in range(4)]
    assert all([opened(process) for process in forced])
    assert [rows(process) for process in [first, *forced]] == [ROWS] * 5
    sizes = {key: len(s3_bucket.get(key)) for key in s3_bucket.keys("tok")}
    assert all(2 * size <= faulty.sent[key] <= 5 * size for key, size in sizes.items())
