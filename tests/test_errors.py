"""Errors say the same in every process."""

import copy

from burnish.errors import ConfigError, DataError, Problem


def test_an_error_travels_whole():
    """Copying takes the way that sending to another process takes."""
    error = copy.copy(DataError("a.jsonl", "is empty", fix="write it again"))
    assert (type(error), str(error)) == (DataError, "a.jsonl: is empty\n  fix: write it again")
    assert (error.where, error.problem, error.fix) == ("a.jsonl", "is empty", "write it again")
    config = copy.copy(ConfigError([Problem("lr", -1, "is below 0", "write 1e-5")]))
    assert [problem.key for problem in config.problems] == ["lr"]
