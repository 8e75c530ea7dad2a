"""Burnish beside `s5cmd cp` fetching a store from a local S3: `python -m benchmarks.download [megabytes=2048] [folder=DIR] [repeats=3]`.

The server is SeaweedFS on the same machine, its objects in the page cache; it takes its share of the processors from
both sides alike. Objects uploaded in parts have an ETag that is no checksum, those put at once have their MD5, which
is compared; a manifest brings SHA-256. The sides take turns; of each the fastest turn is shown. Burnish's seconds are
those after its imports, its memory with them.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import obstore
from obstore.store import S3Store

from burnish.storage.files import file_digest, list_files
from burnish.storage.transfer import fetch
from tests.storage.servers import s3_environment, seaweedfs

SHARDS = 32
SIDES = {"s5cmd": "parts", "Burnish": "parts", "Burnish, MD5": "whole", "Burnish, SHA-256": "parts"}
"""And which of the two stores each fetches."""


def upload(folder: Path, megabytes: int) -> None:
    """Both stores; writes the SHA-256 of their shards by name."""
    store, checksums = S3Store("bench", client_options={"allow_http": True, "timeout": "5m"}), {}
    for number in range(SHARDS):
        name, file = f"part-{number:03}.arrow", folder / "shard"
        file.write_bytes(os.urandom((megabytes << 20) // SHARDS))
        checksums[name] = file_digest(file, "sha256")
        obstore.put(store, f"parts/{name}", file, use_multipart=True, chunk_size=8 << 20)
        obstore.put(store, f"whole/{name}", file, use_multipart=False)
    file.unlink()
    (folder / "checksums.json").write_text(json.dumps(checksums))


def measure_s5cmd(uri: str, target: Path) -> dict[str, float]:
    target.mkdir()
    options = ["--log=error", f"--endpoint-url={os.environ['AWS_ENDPOINT_URL']}"]
    command = [str(Path(sys.executable).with_name("s5cmd")), *options, "cp", f"{uri}/*", f"{target}/"]
    begin = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"s5cmd failed: {status}")
    return numbers(time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss)


def measure_burnish(uri: str, target: Path, checksums: Path) -> dict[str, float]:
    return json.loads(in_a_process("--fetch", uri, str(target), str(checksums)))


def in_a_process(*arguments: str) -> str:
    """This file again: a process begins with the peak of memory that the one it comes from has now."""
    command = [sys.executable, "-m", "benchmarks.download", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def fetch_once(uri: str, target: str, checksums: str) -> None:
    begin, used = time.perf_counter(), time.process_time()
    fetch(uri, list_files(uri), checksums=json.loads(Path(checksums).read_text()), cache_dir=target)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    print(json.dumps(numbers(seconds, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)))


def numbers(seconds: float, cpu: float, kilobytes: int) -> dict[str, float]:
    return {"seconds": seconds, "CPU seconds": cpu, "peak MB": kilobytes / 1000}


def compare(folder: Path, megabytes: int, repeats: int) -> dict[str, dict[str, float]]:
    checksums, none = folder / "checksums.json", folder / "none.json"
    in_a_process("--upload", str(folder), str(megabytes))
    none.write_text("{}")
    best: dict[str, dict[str, float]] = {}
    for turn in range(repeats + 1):
        for side, store in SIDES.items():
            uri, target = f"s3://bench/{store}", folder / "target"
            if side == "s5cmd":
                result = measure_s5cmd(uri, target)
            else:
                result = measure_burnish(uri, target, checksums if side.endswith("SHA-256") else none)
            shutil.rmtree(target)
            print(f"turn {turn}, {side}: {result['seconds']:.2f} s", file=sys.stderr)
            if turn and (side not in best or result["seconds"] < best[side]["seconds"]):  # turn 0 warms the server
                best[side] = result
    return best


def show(best: dict[str, dict[str, float]]) -> None:
    print("| | seconds | beside s5cmd | CPU seconds | peak MB |\n|---|---|---|---|---|")
    for side, of in best.items():
        ratio = of["seconds"] / best["s5cmd"]["seconds"]
        print(f"| {side} | {of['seconds']:.2f} | {ratio:.2f} | {of['CPU seconds']:.2f} | {of['peak MB']:.0f} |")


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    place = given.get("folder") or tempfile.gettempdir()
    with tempfile.TemporaryDirectory(dir=place, prefix="burnish-download-") as folder:
        (Path(folder) / "server").mkdir()
        with seaweedfs(Path(folder) / "server") as url:
            os.environ |= s3_environment(url)
            show(compare(Path(folder), int(given.get("megabytes", 2048)), int(given.get("repeats", 3))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fetch"]:
        fetch_once(*sys.argv[2:])
    elif sys.argv[1:2] == ["--upload"]:
        upload(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
