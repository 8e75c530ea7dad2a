"""Rows as the model will see them: decoded tokens, the trained ones marked."""

import html as markup
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from burnish.assemble import open_train, require_valid
from burnish.config import SFTConfig
from burnish.data.example import Example
from burnish.data.mixture import Mixture
from burnish.errors import DataError
from burnish.models.load import read_tokenizer

_SHOWN = 3
"""Rows shown when neither a row nor a sample is asked for."""

_PAGE = """<!doctype html><meta charset="utf-8"><title>rows</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ white-space: pre-wrap; font: 13px/1.5 ui-monospace, monospace; border: 1px solid #8884; padding: 1rem }}
mark {{ background: light-dark(#b9f0c5, #1d5c2e); color: inherit }}
</style>
{body}
"""


def show_rows(config: SFTConfig, *, row: int | None, sample: int | None, html: Path | None) -> None:
    """Print rows of the training data, or write them as a page; targets are coloured.

    Args:
        config: names the model and the data.
        row: number of the one row to show, over all sources in their order.
        sample: how many rows to show, drawn at random with the config's seed.
        html: file to write the page to instead of printing.

    Raises:
        BurnishError: the config or the data is wrong, or there is no such row.
    """
    card = require_valid(config)
    mixture = Mixture(open_train(config, card))
    tokenizer = read_tokenizer(card.path, trust_remote_code=config.model.trust_remote_code)
    numbers = _chosen(len(mixture), row=row, sample=sample, seed=config.seed)
    titles = {number: _title(mixture, number) for number in numbers}
    if html is not None:
        sections = (f"<h3>{markup.escape(titles[n])}</h3>{_as_html(mixture[n], tokenizer)}" for n in numbers)
        html.write_text(_PAGE.format(body="\n".join(sections)), encoding="utf-8")
        return
    console = Console(soft_wrap=True, highlight=False)
    for number in numbers:
        console.rule(Text(titles[number]), align="left")
        console.print(_as_text(mixture[number], tokenizer, marked=not console.color_system))


def _chosen(num_rows: int, *, row: int | None, sample: int | None, seed: int) -> Sequence[int]:
    if row is not None:
        if not 0 <= row < num_rows:
            raise DataError("row", f"there is no row {row}", fix=f"give 0 to {num_rows - 1}")
        return [row]
    if sample is None:
        return range(min(_SHOWN, num_rows))
    drawn = np.random.default_rng(seed).choice(num_rows, size=min(sample, num_rows), replace=False)
    return [int(number) for number in drawn]


def _title(mixture: Mixture, number: int) -> str:
    counts = f"{mixture.lengths[number]} tokens, {mixture.target_counts[number]} targets"
    return f"row {number}: {mixture.locate(number)}, {counts}"


def _runs(example: Example, tokenizer: Any) -> Iterator[tuple[bool, str]]:
    """(whether they are targets, text) of the runs of tokens that are alike."""
    is_target = [False, *(bool(flag) for flag in example.loss_mask[1:])]
    for targets, run in groupby(range(len(is_target)), key=is_target.__getitem__):
        ids = [int(example.input_ids[position]) for position in run]
        yield targets, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _as_text(example: Example, tokenizer: Any, *, marked: bool) -> Text:
    """Targets in green; where there is no colour (``marked``), between ⟦ and ⟧."""
    text = Text()
    for targets, run in _runs(example, tokenizer):
        text.append(f"⟦{run}⟧" if targets and marked else run, style="bold green" if targets else "")
    return text


def _as_html(example: Example, tokenizer: Any) -> str:
    runs = ((targets, markup.escape(run)) for targets, run in _runs(example, tokenizer))
    return "<pre>" + "".join(f"<mark>{run}</mark>" if targets else run for targets, run in runs) + "</pre>"
