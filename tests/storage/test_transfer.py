"""Objects become files: once, whole, and only as long as they are what the bucket has."""

import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from burnish.data.manifest import MANIFEST_NAME, write_manifest
from burnish.errors import BurnishError, StorageError
from burnish.storage import transfer
from burnish.storage.files import file_digest
from tests.data.stores import to_table, write_arrow, write_shard
from tests.data.test_manifest import MANIFEST
from tests.storage.faults import after, answer, delay, faults, flip, reset
from tests.storage.published import in_cache, marked, pairs, publish, rows_at
from tests.storage.servers import KEYS, OUTSIDER, s3_environment
from tests.toys import row

X, Y = marked(1, 20), marked(2, 20)
LONG = [row(list(range(2000)), [0] + [1] * 1999)] * 40
"""More than a megabyte as Arrow, and little as Parquet."""
READ = """
import sys
from burnish.data.store import open_store
from tests.data.stores import contents
print(contents(open_store(sys.argv[1], name="tok", disable_cache=sys.argv[2] == "disable")))
"""


def read(uri: str, how: str = "plain", *, before: str = "", inside: str = "exec", **environment: str):
    """Open the store in a process; ``inside`` is a shell's words that start it."""
    command = ["sh", "-c", f'{inside} "$@"', "sh", sys.executable, "-c", before + READ, uri, how]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env=os.environ | environment
    )


def test_forced_it_is_fetched_again(s3_bucket, faulty):
    uri = publish(s3_bucket, "tok", [X, Y])
    for force, times in ((False, 1), (False, 1), (True, 2), (False, 2)):
        assert rows_at(uri, force_recache=force) == pairs(X + Y)
        assert {faulty.count("get", key) for key in s3_bucket.keys("tok")} == {times}


def test_without_a_cache_nothing_is_left(s3_bucket, tmp_path):
    uri = publish(s3_bucket, "tok", [X, Y])
    (tmp_path / "private").mkdir()
    done = read(uri, "disable", TMPDIR=str(tmp_path / "private"))
    assert done.stdout == f"{pairs(X + Y)}\n", done.stderr
    assert list((tmp_path / "private").iterdir()) == []
    assert not Path(os.environ["BURNISH_CACHE"]).exists()


def test_only_rows_are_fetched(s3_bucket, faulty):
    """Not what other tools leave beside them, nor the empty objects that some make of folders."""
    uri = publish(s3_bucket, "tok/day=1", [X])
    for key in ("_SUCCESS", "_temporary/0/part-009.parquet", ".part-000.parquet.crc", "day=1/.hidden"):
        s3_bucket.put(f"tok/{key}", b"no rows")
    s3_bucket.put("tokens/part-000.parquet", b"of another store")
    assert rows_at(uri.removesuffix("/day=1")) == pairs(X)
    assert list(faulty.sent) == ["tok/day=1/part-000.parquet"]


@pytest.mark.parametrize("names", [["a.jsonl", "a.jsonl/b.jsonl"], ["n" * 249 + ".jsonl"]])
def test_keys_that_cannot_be_files_are_named(s3_bucket, names):
    for name in names:
        s3_bucket.put(f"tok/{name}", b'{"input_ids": [1, 2], "loss_mask": [0, 1]}\n')
    with pytest.raises(StorageError, match=rf"{s3_bucket.uri('tok')}: has keys that cannot be files"):
        rows_at(s3_bucket.uri("tok"))


RESUMED = """
from burnish.storage import transfer
transfer.RANGE_BYTES, transfer.THREADS = 1 << 16, 2
"""


def test_a_killed_fetch_goes_on_in_the_middle_of_an_object(s3_bucket, faulty, tmp_path):
    file = write_arrow(tmp_path / "a.arrow", to_table(LONG))
    size = file.stat().st_size
    assert size > 12 << 16
    s3_bucket.put("tok/a.arrow", file.read_bytes())
    faulty.on("get", delay(0.1))
    command = [sys.executable, "-c", RESUMED + READ, s3_bucket.uri("tok"), "plain"]
    process = subprocess.Popen(command)
    while faulty.count("get") < 10:
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    had = sum(path.stat().st_size for path in Path(os.environ["BURNISH_CACHE"]).rglob("*.part"))
    assert had >= 6 << 16
    faulty.heal()
    done = read(s3_bucket.uri("tok"), before=RESUMED)
    assert done.stdout == f"{pairs(LONG)}\n", done.stderr
    assert faulty.sent == {"tok/a.arrow": size - had}


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_what_the_cache_lost_is_fetched_again(s3_bucket, kind):
    """As after a loss of power."""
    uri = publish(s3_bucket, "tok", [X, Y], kind=kind)
    assert rows_at(uri) == pairs(X + Y)
    (lost,) = (Path(os.environ["BURNISH_CACHE"]) / "objects").rglob("part-001.*")
    os.truncate(lost, 100)
    assert rows_at(uri) == pairs(X + Y)


@pytest.mark.parametrize(
    "fault", [answer(503, "SlowDown"), answer(429, "SlowDown"), answer(500, "InternalError"), reset]
)
def test_what_may_pass_is_tried_again(s3_bucket, faulty, impatient, fault):
    uri = publish(s3_bucket, "tok", [X, Y])
    faulty.on("get", fault, times=2)
    faulty.on("list", fault, times=1)
    assert rows_at(uri) == pairs(X + Y)


@pytest.mark.parametrize("fault", [answer(503, "SlowDown"), reset])
def test_what_does_not_pass_ends_with_the_place_and_the_reason(s3_bucket, faulty, impatient, fault):
    uri = publish(s3_bucket, "tok", [X])
    faulty.on("get", fault)
    with pytest.raises(StorageError, match=rf"{uri}/part-000\.parquet: cannot be had \((503 SlowDown|.+)\)"):
        rows_at(uri)
    assert 3 <= faulty.count("get") <= 12
    assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_an_object_that_changes_after_the_listing(request, monkeypatch, scheme, change):
    """The emulator of Google's store looks at no condition: the reply itself says that it is another object."""
    bucket = request.getfixturevalue({"s3": "s3_bucket", "gs": "google_bucket"}[scheme])
    uri = publish(bucket, "tok", [X], kind="jsonl")
    key, other = "tok/part-000.jsonl", "".join(f'{{"input_ids": {i}, "loss_mask": {m}}}\n' for i, m in pairs(Y))
    action = {"replaced": lambda: bucket.put(key, other.encode()), "removed": lambda: bucket.delete(key)}[change]
    with faults(bucket.server) as proxy:
        for name, value in {**s3_environment(proxy.url), "STORAGE_EMULATOR_HOST": proxy.url}.items():
            monkeypatch.setenv(name, value)
        proxy.on("get", after(action), times=1)
        with pytest.raises(StorageError, match=rf"{uri}/part-000\.jsonl: was replaced or removed while it was read"):
            rows_at(uri)
        assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []
        if change == "replaced":
            assert rows_at(uri) == pairs(Y)


def test_a_byte_that_is_damaged_on_the_way_is_fetched_again(s3_bucket, faulty):
    uri = publish(s3_bucket, "tok", [X], kind="jsonl")
    faulty.on("get", flip(16), times=1)  # a digit of the first row
    assert rows_at(uri) == pairs(X)
    assert faulty.count("get") == 2


def test_bytes_that_are_damaged_each_time_are_an_error(s3_bucket, faulty):
    uri = publish(s3_bucket, "tok", [X], kind="jsonl")
    for place in range(9):
        faulty.on("get", flip(16 + place), skip=place, times=1)
    with pytest.raises(StorageError, match=rf"{uri}/part-000\.jsonl: comes damaged"):
        rows_at(uri)
    assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []


@pytest.fixture
def with_manifest(s3_bucket, tmp_path) -> str:
    """A store of two shards and their checksums."""
    files = [write_shard(tmp_path / "made", number, rows, kind="jsonl") for number, rows in enumerate((X, Y))]
    checksums = {file.name: file_digest(file, "sha256") for file in files}
    facts = replace(MANIFEST, rows=40, rows_read=40, dropped={}, checksums=checksums)
    write_manifest(tmp_path / "made", facts)
    assert sorted(path.name for path in (tmp_path / "made").iterdir())[0] == MANIFEST_NAME
    s3_bucket.upload(tmp_path / "made", "tok")
    return s3_bucket.uri("tok")


def test_a_shard_that_its_manifest_does_not_know_is_refused(s3_bucket, with_manifest):
    s3_bucket.put("tok/part-001.jsonl", s3_bucket.get("tok/part-000.jsonl"))
    for _ in range(2):
        with pytest.raises(
            StorageError, match=rf"{with_manifest}/part-001\.jsonl: differs from the checksum that was written"
        ):
            rows_at(with_manifest)
    assert in_cache(Path(os.environ["BURNISH_CACHE"])) == []


def test_the_manifest_sees_what_was_damaged_on_the_way(faulty, with_manifest):
    faulty.on("get", flip(16), where=lambda request: request.key == "tok/part-001.jsonl", times=1)
    with pytest.raises(StorageError, match=r"part-001\.jsonl: differs from the checksum that was written"):
        rows_at(with_manifest)
    assert rows_at(with_manifest) == pairs(X + Y)


def test_a_manifest_whose_shards_are_gone_is_refused(s3_bucket, with_manifest):
    s3_bucket.delete("tok/part-001.jsonl")
    with pytest.raises(BurnishError, match=r"holds 20 rows, its manifest says 40|part-001\.jsonl"):
        rows_at(with_manifest)


def inside_mount(command: str) -> str:
    """A shell's words that make a mount for the process they start, and for nobody else."""
    return f"exec unshare {'-m' if os.geteuid() == 0 else '-rm'} sh -c '{command} && exec \"$@\"' sh"


def test_a_cache_without_room_is_named_before_anything_is_fetched(s3_bucket, faulty, tmp_path):
    s3_bucket.put("tok/a.arrow", write_arrow(tmp_path / "a.arrow", to_table(LONG)).read_bytes())
    (tmp_path / "small").mkdir()
    mount = inside_mount(f"mount -t tmpfs -o size=256k none {tmp_path}/small")
    done = read(s3_bucket.uri("tok"), inside=mount, BURNISH_CACHE=str(tmp_path / "small"))
    assert f"StorageError: {tmp_path}/small" in done.stderr
    assert "is full (" in done.stderr
    assert "fix: free some space, or set cache_dir" in done.stderr
    assert faulty.count("get") == 0


@pytest.mark.parametrize("kind", ["arrow file", "parquet"])
def test_a_disk_that_fills_meanwhile_is_named(s3_bucket, tmp_path, kind):
    """Another process takes the room: while an Arrow file is fetched, and while Parquet, which is small, is converted."""
    uri = publish(s3_bucket, "tok", [LONG], kind=kind)
    (tmp_path / "small").mkdir()
    mount = inside_mount(f"mount -t tmpfs -o size=512k none {tmp_path}/small")
    before = "from burnish.storage import transfer\ntransfer.require_space = lambda *_: None\n"
    done = read(uri, before=before, inside=mount, BURNISH_CACHE=str(tmp_path / "small"))
    assert f"StorageError: {tmp_path}/small" in done.stderr, done.stderr
    assert "is full (" in done.stderr
    assert "fix: free some space, or set cache_dir" in done.stderr


def test_a_cache_that_is_read_only_is_named_unless_it_has_the_store(s3_bucket, tmp_path):
    cold, warm = (publish(s3_bucket, prefix, [rows]) for prefix, rows in (("cold", X), ("warm", Y)))
    cache = Path(os.environ["BURNISH_CACHE"])
    assert rows_at(warm) == pairs(Y)
    mount = inside_mount(f"mount --bind {cache} {cache} && mount -o remount,bind,ro {cache}")
    done = read(cold, inside=mount)
    assert f"StorageError: {cache}" in done.stderr
    assert "cannot be written ([Errno 30] Read-only file system" in done.stderr
    assert "fix: set cache_dir to a folder you may write" in done.stderr
    assert read(warm, inside=mount).stdout == f"{pairs(Y)}\n"


def test_credentials_are_told_to_nobody(s3_bucket, faulty, impatient, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    uri, said = publish(s3_bucket, "tok", [X]), []
    secrets = [*KEYS.values(), OUTSIDER[1], *KEYS, OUTSIDER[0]]
    assert rows_at(uri) == pairs(X)
    for fault in (answer(403, "AccessDenied"), answer(400, "ExpiredToken"), answer(404, "NoSuchBucket"), reset):
        faulty.heal()
        faulty.on("list", fault)
        with pytest.raises(StorageError) as caught:
            rows_at(uri)
        said.append(f"{caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}")
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [secret for secret in secrets if secret in caplog.text + "".join(said) or secret.encode() in kept]


def test_it_takes_no_more_memory_than_its_reads(s3_bucket, tmp_path):
    """120 MB through 8 reads of 8 MiB each."""
    body = os.urandom(1 << 20) * 60
    for number in range(2):
        s3_bucket.put(f"tok/{number}.bin", body)
    script = (
        "import sys\nfrom burnish.storage.files import list_files\nfrom burnish.storage.transfer import fetch\n"
        "import resource\nstart = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "fetch(sys.argv[1], list_files(sys.argv[1]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, s3_bucket.uri("tok")], check=True, capture_output=True, text=True, timeout=100
    )
    assert int(done.stdout) < 2 * transfer.THREADS * transfer.RANGE_BYTES // 1024


def test_what_was_sent_and_is_still_there_is_not_sent_again(s3_bucket, faulty, tmp_path):
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    folder, names = tmp_path / "made", ["a", "sub/b", "c"]
    (folder / "sub").mkdir(parents=True)
    for name in names:
        (folder / name).write_text(name)
    transfer.send(folder, s3_bucket.uri("out"), names=names[:2])
    s3_bucket.put("out/a", b"of another")
    with (folder / transfer.SENT_NAME).open("a") as notes:
        notes.write('["c", "torn')
    faulty.heal()
    transfer.send(folder, s3_bucket.uri("out"), names=names)
    assert sorted(request.key for request in faulty.requests if request.kind == "put") == ["out/a", "out/c"]
    assert [s3_bucket.get(f"out/{name}").decode() for name in names] == names
    transfer.clear(s3_bucket.uri("out"), last="c")
    assert s3_bucket.keys("out") == []
    assert [request.key for request in faulty.requests if request.kind == "delete"][-1] == "out/c"


def test_a_large_file_is_sent_in_parts(s3_bucket, faulty, tmp_path):
    s3_bucket.put("before", b"this server makes a bucket with its first object")
    (tmp_path / "big").write_bytes(body := os.urandom((2 << 23) + 1))
    transfer.send(tmp_path, s3_bucket.uri("out"), names=["big"])
    parts = [request.query["partNumber"] for request in faulty.requests if request.kind == "put"]
    assert sorted(parts) == ["1", "2", "3"]
    assert s3_bucket.get("out/big") == body
