"""What is published: a source archive that builds, a wheel that runs, few packages beside it."""

import email.parser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.source import PACKAGE, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MOST_OWN_PACKAGES = 20
_MADE = shutil.ignore_patterns("__pycache__")


def run(*command, folder, **environment):
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, text=True, capture_output=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the source archive and of the wheel, which is made of the archive."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    shutil.copytree(ROOT / "tests", source / "tests", ignore=_MADE)
    shutil.copytree(PACKAGE, source / "burnish", ignore=_MADE)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source), folder=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built):
    """A folder that holds the wheel, installed, and nothing else."""
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(*pip, "--target", "site", str(wheel), folder=built)
    return built / "site"


def test_the_wheel_holds_the_package_whole_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (file for file in PACKAGE.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert found == {file.relative_to(ROOT).as_posix() for file in files}
    assert "burnish/py.typed" in found


def test_the_source_archive_holds_what_its_reader_needs(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        names = {name.partition("/")[2] for name in members.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert wanted < names
    assert [name for name in names if name.startswith("tests")] == []


def test_the_installed_command_runs(installed, built):
    said = run(sys.executable, "-m", "burnish", "--help", folder=built, PYTHONPATH=str(installed))
    assert "train" in said
    where = run(
        sys.executable, "-c", "import burnish; print(burnish.__file__)", folder=built, PYTHONPATH=str(installed)
    )
    assert where.strip() == str(installed / "burnish" / "__init__.py")
    (entries,) = installed.glob("burnish-*.dist-info/entry_points.txt")
    assert "burnish = burnish.cli.main:run" in entries.read_text()


def test_the_metadata_are_valid_and_say_the_license(installed):
    (folder,) = installed.glob("burnish-*.dist-info")
    text = (folder / "METADATA").read_text(encoding="utf-8")
    said = Metadata.from_email(text, validate=True)
    assert said.license_expression == "Apache-2.0"
    assert said.license_files == ["LICENSE"]
    assert (folder / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert said.description_content_type == "text/markdown"
    assert email.parser.HeaderParser().parsestr(text)["Keywords"]


def everything_needed_by(requirements):
    """Names of all packages that installing ``requirements`` on this machine brings."""
    todo, seen = [Requirement(text) for text in requirements], set()
    while todo:
        wanted = todo.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for needed in map(Requirement, requires(name) or []):
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                todo.append(needed)
    return {name for name, _ in seen}


def test_few_packages_come_beside_those_of_torch_transformers_and_datasets():
    own = everything_needed_by(PROJECT["dependencies"]) - everything_needed_by(["torch", "transformers", "datasets"])
    told = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What installing brings")[2]
    (line,) = re.findall(r"^`.*`$", told, re.MULTILINE)
    listed = set(re.findall(r"`([\w-]+)`", line))
    assert "obstore" in own
    assert own <= listed
    assert len(listed) < MOST_OWN_PACKAGES


def test_each_check_runs_before_a_commit_too():
    hooks = ROOT / ".pre-commit-config.yaml"
    run(sys.executable, "-m", "pre_commit", "validate-config", str(hooks), folder=ROOT)
    (repository,) = yaml.safe_load(hooks.read_text(encoding="utf-8"))["repos"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    checks = re.findall(r"\$\(BIN\)/(\w+(?:-\w+)*(?: (?:format|check)\b)?)", makefile)
    assert repository["repo"] == "local", "nothing is fetched"
    assert [hook["entry"].removeprefix(".venv/bin/").partition(" --")[0] for hook in repository["hooks"]] == checks


def test_the_changelog_tells_of_this_version():
    assert f"\n## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
