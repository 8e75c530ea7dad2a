"""publish_once: one build, whole or not at all, whoever asks and whoever dies."""

import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.errors import StorageError
from burnish.storage.cache import RETIRED_SECONDS, cache_root, private_folder, publish_once, published


def _hidden(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock") and p.name.startswith("."))


def test_many_threads_build_once(tmp_path: Path) -> None:
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        time.sleep(0.1)
        (folder / "rows").write_text("whole")

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: publish_once(tmp_path / "a" / "store", build=build), range(8)))
    assert len(builds) == 1
    assert {(f / "rows").read_text() for f in folders} == {"whole"}
    assert _hidden(tmp_path / "a") == []


def test_many_processes_build_once(tmp_path: Path) -> None:
    script = (
        "import sys, time, os\nfrom pathlib import Path\nfrom burnish.storage.cache import publish_once\n"
        "def build(folder):\n"
        "    open(sys.argv[1] + '/builds', 'a').write('x')\n"
        "    (folder / 'a').write_text('1'); time.sleep(0.3); (folder / 'b').write_text('2')\n"
        "folder = publish_once(Path(sys.argv[1]) / 'store', build=build)\n"
        "assert (folder / 'a').read_text() + (folder / 'b').read_text() == '12'\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(4)]
    assert [p.wait(60) for p in processes] == [0] * 4
    assert (tmp_path / "builds").read_text() == "x"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        publish_once(tmp_path / "store", build=fail)
    assert not (tmp_path / "store").exists()
    assert _hidden(tmp_path) == []


def test_killed_build_counts_as_nothing_and_is_cleaned(tmp_path: Path) -> None:
    script = (
        "import sys, os, signal\nfrom pathlib import Path\nfrom burnish.storage.cache import publish_once\n"
        "def build(folder):\n"
        "    (folder / 'half').write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "publish_once(Path(sys.argv[1]) / 'store', build=build)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=60).returncode == -9
    assert not (tmp_path / "store").exists()
    assert len(_hidden(tmp_path)) == 1
    publish_once(tmp_path / "store", build=lambda folder: (folder / "whole").touch())
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["whole"]
    assert _hidden(tmp_path) == []


def test_force_makes_a_generation_and_spares_readers(tmp_path: Path) -> None:
    old = publish_once(tmp_path / "store", build=lambda f: (f / "rows").write_bytes(b"old"))
    with (old / "rows").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    new = publish_once(tmp_path / "store", build=lambda f: (f / "rows").write_bytes(b"new"), force=True)
    assert publish_once(tmp_path / "store", build=lambda _: None) == published(tmp_path / "store") == new
    assert (new / "rows").read_bytes() == b"new"
    assert (old / "rows").read_bytes() == b"old", "whoever is about to open more of its files finds them"
    os.utime(old, (0, time.time() - RETIRED_SECONDS - 9))
    os.utime(new, (0, time.time() - RETIRED_SECONDS - 9))
    newer = publish_once(tmp_path / "store", build=lambda f: (f / "rows").write_bytes(b"newer"), force=True)
    assert mapped[:] == b"old"
    assert not old.exists()
    assert (new / "rows").read_bytes() == b"new", "its days are counted from now"
    assert published(tmp_path / "store") == newer
    newest = [publish_once(tmp_path / "store", build=lambda _: None, force=True) for _ in range(9)][-1]
    assert published(tmp_path / "store") == newest, "11 comes after 9"


def test_generations_of_a_neighbour_are_not_mine(tmp_path: Path) -> None:
    names = ("a", "a.b", "[a]", "*")
    for name in names:
        for force in (False, True):
            publish_once(tmp_path / name, build=lambda f, name=name: (f / name).touch(), force=force)
    assert [list(published(tmp_path / name).iterdir()) for name in names] == [
        [published(tmp_path / name) / name] for name in names
    ]


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file.*cannot be written.*\n.*cache_dir"):
        publish_once(tmp_path / "file" / "store", build=lambda _: None)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """/dev/full is a file on a disk without space."""
    with pytest.raises(StorageError, match=r"is full .*\n  fix: free some space"):
        publish_once(tmp_path / "store", build=lambda _: Path("/dev/full").write_text("x"))
    assert _hidden(tmp_path) == []


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_root(None) == Path(os.environ["BURNISH_CACHE"])
    assert cache_root("~/x") == Path.home() / "x"
    assert cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("BURNISH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "burnish"


def test_private_folder_goes_with_its_process() -> None:
    script = (
        "from burnish.storage.cache import private_folder\n"
        "f = private_folder(); (f / 'a').touch(); g = private_folder(); assert f != g; print(f)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert not Path(done.stdout.strip()).exists()
    assert private_folder().is_dir()


def test_private_folders_of_killed_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom burnish.storage.cache import private_folder\n"
        "print(private_folder(), flush=True)\nif sys.argv[1] == 'die': os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    def start(how: str) -> subprocess.Popen:
        command = [sys.executable, "-c", script, how]
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    dead, alive = start("die"), start("live")
    folders = [Path(process.stdout.readline().strip()).parent for process in (dead, alive)]
    dead.communicate()
    (tmp_path / "burnish-private-other").mkdir()
    for folder in folders:
        os.utime(folder / ".in-use", (0, 0))
    third = start("live")
    third.stdout.readline()
    assert [folder.exists() for folder in folders] == [False, True]
    assert (tmp_path / "burnish-private-other").exists(), "it is not known to be one of them"
    for process in (alive, third):
        process.communicate("")
