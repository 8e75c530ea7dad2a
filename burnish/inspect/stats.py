"""A store becomes a page of numbers: its manifest, what was dropped, how long its rows are and how much is trained."""

from dataclasses import asdict

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from burnish.data.example import IntArray
from burnish.data.manifest import Manifest
from burnish.data.store import Store

_BAR = 40
_QUANTILES = (0.5, 0.9, 0.99)


def show_stats(store: Store) -> None:
    """Print the manifest of ``store``, its drop reasons, and histograms of tokens and targets a row."""
    console = Console(highlight=False, soft_wrap=True)
    console.rule(escape(store.name), align="left")
    report, manifest = store.report, store.manifest
    if manifest:
        console.print(_facts(manifest))
    counts = f"{report.kept:,} of {report.rows:,} rows, {report.tokens:,} tokens, {report.targets:,} targets"
    console.print(f"{counts} ({report.targets / report.tokens:.1%})")
    for reason, count in report.dropped.items():
        example = manifest.drop_examples.get(reason, "") if manifest else ""
        console.print(escape(f"dropped {reason}: {count:,}" + (f", such as {example}" if example else "")))
    for title, values in (("tokens a row", store.lengths), ("targets a row", store.target_counts)):
        quantiles = ", ".join(
            f"{q:.0%} {v:,.0f}" for q, v in zip(_QUANTILES, np.quantile(values, _QUANTILES), strict=True)
        )
        console.print(f"{title}: mean {values.mean():,.1f}, {quantiles}, most {values.max():,}")
        console.print(_histogram(values))


def _facts(manifest: Manifest) -> Table:
    table = Table(box=None, show_header=False)
    left_out = ("dropped", "drop_examples", "checksums")
    for name, value in asdict(manifest).items():
        if name not in left_out:
            table.add_row(name, escape(str(value)))
    table.add_row("shards with a checksum", str(len(manifest.checksums)))
    return table


def _histogram(values: IntArray) -> Table:
    """How many rows lie between one power of two and the next."""
    counts = np.bincount(np.frexp(values)[1])
    table = Table(box=None, show_header=False)
    for exponent in range(int(np.flatnonzero(counts)[0]), len(counts)):
        first, last = (2**exponent) // 2, 2**exponent - 1
        bar = "█" * round(_BAR * int(counts[exponent]) / int(counts.max()))
        table.add_row(f"{first:,} to {last:,}", f"{counts[exponent]:,}", bar)
    return table
