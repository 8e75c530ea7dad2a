import os

import pytest

from burnish.errors import StorageError
from burnish.storage.files import describe_file, list_files


def test_hidden_entries_are_left_out_and_links_followed(tmp_path):
    for name in ("a/1", "a/.2", "_b/3", ".c/4", "d", "e e/#5%"):
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_text(name)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "6").touch()
    (tmp_path / "store" / "f").symlink_to(tmp_path / "outside")
    (tmp_path / "store" / "a" / "loop").symlink_to(tmp_path / "store")
    (tmp_path / "store" / "g").symlink_to(tmp_path / "store" / "d")
    files = list_files(tmp_path / "store")
    assert [file.name for file in files] == ["a/1", "d", "e e/#5%", "f/6", "g"]
    assert [file.size for file in files] == [3, 1, 7, 0, 1]
    assert all(file.uri == str(tmp_path / "store" / file.name) for file in files)


def test_identity_tells_versions_apart(tmp_path):
    file = tmp_path / "a"
    file.write_text("one")
    first = describe_file(file)
    assert describe_file(file) == first
    stamp = file.stat().st_mtime_ns
    (tmp_path / "b").write_text("two")
    os.utime(tmp_path / "b", ns=(stamp, stamp))
    (tmp_path / "b").replace(file)
    assert describe_file(file).size == first.size
    assert describe_file(file).identity != first.identity


def test_two_names_of_one_file_have_a_name_each(tmp_path):
    (tmp_path / "a").touch()
    assert describe_file(tmp_path / "a").name == "a"
    assert describe_file(tmp_path / "a", name="deep/a").name == "deep/a"


def test_a_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match="a: cannot be read"):
        list_files(tmp_path)
