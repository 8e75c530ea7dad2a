"""Errors say the same in every process."""

import copy

from burnish.cli.main import main
from burnish.errors import ConfigError, DataError, Problem, StorageError, without_secret_values


def test_an_error_travels_whole():
    """Copying takes the way that sending to another process takes."""
    error = copy.copy(DataError("a.jsonl", "is empty", fix="write it again"))
    assert (type(error), str(error)) == (DataError, "a.jsonl: is empty\n  fix: write it again")
    assert (error.where, error.problem, error.fix) == ("a.jsonl", "is empty", "write it again")
    config = copy.copy(ConfigError([Problem("lr", -1, "is below 0", "write 1e-5")]))
    assert [problem.key for problem in config.problems] == ["lr"]


def test_a_password_in_a_url_is_not_shown():
    error = StorageError("s3://me:hunter2@b/k", "GET http://me:hunter2@host:9/b failed", fix="try again")
    assert "hunter2" not in str(error) + error.where + error.problem
    assert "http://***@host:9/b" in str(error)


def test_a_password_in_a_path_is_refused_and_not_shown(capsys):
    assert main(["check", "--json", "model.path=m", "pretokenized_dataset_paths=s3://me:hunter2@b/k"]) == 2
    shown = capsys.readouterr()
    assert "has a user or a password in it" in shown.out
    assert "hunter2" not in shown.out + shown.err


def test_secrets_are_known_by_their_keys_and_in_urls():
    hidden = {
        "api_key": "a",
        "x": [{"hf.token": "b", "max_tokens": 3}, "s3://u:p@b/c", "https://b/k?X-Amz-Signature=d&y=1"],
    }
    shown = {
        "api_key": "***",
        "x": [{"hf.token": "***", "max_tokens": 3}, "s3://***@b/c", "https://b/k?X-Amz-Signature=***&y=1"],
    }
    assert without_secret_values(hidden) == shown
