"""The command line: words in, exit status out. Imports nothing heavy before a command is known to be right."""

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from burnish.cli import commands
from burnish.cli.commands import Request
from burnish.config.docs import help_text
from burnish.config.read import is_assignment
from burnish.config.rules_devices import environment_rank, environment_world
from burnish.errors import BurnishError, ConfigError, Problem
from burnish.log import configure_logging

_WRONG_INPUT, _INTERRUPTED = 2, 130
_BY_RANKS = ("train", "eval")
"""Commands whose processes under torchrun or SLURM are ranks of one run."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and how its words are read."""

    sentence: str
    run: Callable[[Request], int]
    first: str = ""
    """What stands before the config."""
    own: Mapping[str, str] = field(default_factory=dict)
    """Its own ``key=value`` keys, with what they mean."""
    has_json: bool = False
    lists_keys: bool = False
    """Whether its help lists every config key."""
    words: str = "[RUN.yaml] [key=value ...]"
    """What it takes, after ``first``."""


COMMANDS = {
    "train": Command("train a model", commands.train, lists_keys=True),
    "check": Command(
        "say all that is wrong with a config, its model and its data, or what the run would do",
        commands.check,
        own={
            "device": "the GPU it is to run on, such as h100-80g; that of this machine",
            "mfu": "share of its operations that are taken to be used, for the time; 0.4",
        },
        has_json=True,
    ),
    "tokenize": Command(
        "write the training data as tokenized stores",
        commands.tokenize,
        own={"out": "folder to write; required"},
    ),
    "inspect": Command(
        "show decoded rows, their trained tokens coloured (rows), where the rows of a step of the run stand (step N), or "
        "the manifest and histograms of a store (stats STORE)",
        commands.inspect,
        first="rows|step N|stats STORE",
        own={"row": "the one row to show, from 0", "sample": "how many rows, drawn", "html": "page to write instead"},
        has_json=True,
    ),
    "eval": Command(
        "evaluate model.path, with the weights of the checkpoint resume_from if one is given",
        commands.evaluate,
        has_json=True,
    ),
    "export": Command(
        "write a checkpoint as a Hugging Face folder",
        commands.export,
        first="CHECKPOINT",
        own={"out": "folder to write; required"},
    ),
    "report": Command(
        "write the curves, data and config of runs as one page that needs no network, RUN_DIR/report.html",
        commands.report,
        own={"out": "file to write instead; several runs share a page, by default in the folder of the first"},
        words="RUN_DIR [RUN_DIR ...] [out=FILE]",
    ),
    "bench": Command(
        "measure throughput with random weights, of model.path's shape or of a small one, on the config's data or on "
        "rows of random tokens",
        commands.bench,
        own={
            "lengths": "lognormal (default) or fixed, where no data is named",
            "mean": "tokens of a row; 300",
            "cv": "standard deviation of a lognormal length, by the mean; 1.3",
            "targets": "share of the tokens that are trained on; 1",
            "vocabulary": "tokens the small model knows; 16384",
            "steps": "measured steps; 10",
            "warmup": "steps before these; 2",
            "compare": "trl: measure TRL's SFTTrainer too, on the same rows and weights",
        },
        has_json=True,
    ),
}


def run() -> NoReturn:
    """The entry point: ``main`` as the exit status of the process."""
    # Callbacks and samplers may lie where the command is given, as with python -m; last, so as to hide no package.
    sys.path.append(str(Path.cwd()))
    # So that what is removed at exit is; a run that trains notes the signal itself.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``burnish``; none is those of this process.

    Returns:
        0 done, 2 wrong input, 130 or 143 interrupted. A fault of our own is raised: Python then exits with 1.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    configure_logging(rank=environment_rank(os.environ))
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else _WRONG_INPUT
    try:
        return _run_command(words[0], words[1:])
    except BurnishError as error:
        if isinstance(error, ConfigError) and words[0] in _BY_RANKS and environment_world(os.environ):
            _tell_as_rank(error)
        print(error, file=sys.stderr)
        return _WRONG_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED


def _tell_as_rank(error: ConfigError) -> NoReturn:
    """All ranks that were given this config have found the same: one says so."""
    from burnish.launch.rank import placed

    with placed():
        raise error


def _run_command(name: str, words: Sequence[str]) -> int:
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0) or ["train"]
        raise ConfigError([Problem("command", name, "there is no such command", f"write burnish {near[0]}")])
    if dashed := [word[2:] for word in words if word.startswith("--") and is_assignment(word[2:])]:
        raise ConfigError([Problem(f"--{word}", None, "has dashes before its key", f"write {word}") for word in dashed])
    parser = _parser(name, command)
    try:
        options = parser.parse_intermixed_args(words)
    except SystemExit as stop:
        # argparse has printed the help, or what is wrong with an option.
        return int(stop.code or 0)
    return command.run(_sorted(command, options.words, as_json=command.has_json and options.json))


def _sorted(command: Command, words: Sequence[str], *, as_json: bool) -> Request:
    rest = list(words)
    first = rest.pop(0) if command.first and rest and not is_assignment(rest[0]) else ""
    second = rest.pop(0) if rest and not is_assignment(rest[0]) else ""
    assigned = [(word, *word.partition("=")[::2]) for word in rest]
    own = {key: value for _, key, value in assigned if key in command.own}
    overrides = tuple(word for word, key, _ in assigned if key not in command.own)
    return Request(first=first, second=second, overrides=overrides, own=own, as_json=as_json)


def _parser(name: str, command: Command) -> argparse.ArgumentParser:
    notes = [f"  {key}=...   {meaning}" for key, meaning in command.own.items()]
    if notes:
        notes.insert(0, "Its own keys:")
    if "RUN.yaml" in command.words:
        notes.append(help_text() if command.lists_keys else "\nburnish train --help lists the config keys.")
    before = f"{command.first} " if command.first else ""
    parser = argparse.ArgumentParser(
        prog=f"burnish {name}",
        usage=f"burnish {name} {before}{command.words}" + (" [--json]" if command.has_json else ""),
        description=command.sentence[0].upper() + command.sentence[1:] + ".",
        epilog="\n".join(notes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    if command.has_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.sentence}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: burnish COMMAND [RUN.yaml] [key=value ...]", "", *lines, "", "burnish COMMAND --help"])
