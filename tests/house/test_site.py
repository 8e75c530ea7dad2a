"""The site is built without a warning, and a link that leads nowhere is one."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT


def built(folder: Path, *, root: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = built(folder)
    assert (done.returncode, re.findall("WARNING.*|ERROR.*", done.stderr)) == (0, [])
    return folder


def test_every_page_is_there_and_fetches_nothing(site):
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {folder.name for folder in site.iterdir()}
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?https?:", text) == [], page


def test_a_file_of_the_repository_is_a_page(site):
    assert 'href="../source/examples/curriculum/order.py/"' in (site / "samplers/index.html").read_text()
    assert "class" in (site / "source/examples/curriculum/order.py/index.html").read_text()


def test_public_names_have_their_docstrings(site):
    text = (site / "api/index.html").read_text()
    for name in ("SFTConfig", "SFTTrainer", "load_from_pretokenized", "TrainOnWhat", "DataMixingSampler", "Callback"):
        assert re.search(rf"id=\"?burnish\.[\w.]*{name}[\"> ]", text), name
    assert "memory-mapped" in text


def test_links_that_lead_nowhere_are_found(tmp_path):
    """One of each kind: a page, an anchor, a file of the repository."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/hooks.py", tmp_path / "docs")
    config = (ROOT / "mkdocs.yml").read_text()
    (tmp_path / "mkdocs.yml").write_text(config[: config.index("nav:")])
    (tmp_path / "docs/index.md").write_text("# A\n\n[b](b.md) [c](#c) [d](../d.py)\n")
    done = built(tmp_path / "site", root=tmp_path)
    assert done.returncode == 1
    assert [name for name in ("'b.md'", "'#c'", "'../d.py'") if name not in done.stderr] == []
