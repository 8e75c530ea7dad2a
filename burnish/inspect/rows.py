"""Rows as the model will see them: decoded tokens, the trained ones marked, and the images."""

import html as markup
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.text import Text

from burnish.assemble.data import open_train
from burnish.assemble.model import cache_settings, require_valid
from burnish.config import SFTConfig
from burnish.data.example import Example, Images
from burnish.data.mixture import Mixture
from burnish.data.pictures import ImageReader, picture_uri
from burnish.data.rows import RawRows, open_rows
from burnish.data.spans import TextSpan, decoded_spans
from burnish.data.store import Store
from burnish.errors import DataError
from burnish.models.load import read_tokenizer
from burnish.models.vision import VisionCard
from burnish.storage.transfer import fetch

_SHOWN = 3
"""Rows shown when neither a row nor a sample is asked for."""

_PAGE = """<!doctype html><meta charset="utf-8"><title>rows</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ white-space: pre-wrap; font: 13px/1.5 ui-monospace, monospace; border: 1px solid #8884; padding: 1rem }}
mark {{ background: light-dark(#b9f0c5, #1d5c2e); color: inherit }}
b {{ font-weight: normal; opacity: 0.6 }}
figure {{ display: inline-block; margin: 0 1rem 0 0 }}
img {{ min-width: 8rem; max-width: 100%; image-rendering: pixelated }}
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
    stores = open_train(config, card)
    mixture, places = Mixture(stores), RowPlaces(config, stores)
    tokenizer = read_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    numbers = _chosen(len(mixture), row=row, sample=sample, seed=config.seed)
    counts = {n: f"{mixture.lengths[n]} tokens, {mixture.target_counts[n]} targets" for n in numbers}
    titles = {n: f"row {n}: {places.locate(n)}, {counts[n]}" for n in numbers}
    remarks = [remark for store in stores for remark in _remarks(store)]
    if html is not None:
        rows = {n: mixture[n] for n in numbers}
        has_images = any(example.images for example in rows.values())
        reader = ImageReader(card.path, trust_remote_code=config.model.trust_remote_code) if has_images else None
        sections = [
            f"<h3>{markup.escape(titles[n])}</h3>{_figures(rows[n].images, card.vision, reader)}"
            f"{_as_html(rows[n], tokenizer, card.vision)}"
            for n in numbers
        ]
        sections += [f"<p>{markup.escape(remark)}</p>" for remark in remarks]
        html.write_text(_PAGE.format(body="\n".join(sections)), encoding="utf-8")
        return
    console = Console(soft_wrap=True, highlight=False)
    for number in numbers:
        console.print(Text(f"── {titles[number]}", style="bold"))
        example = mixture[number]
        for caption in _captions(example.images, card.vision):
            console.print(Text(caption))
        console.print(_as_text(example, tokenizer, card.vision, marked=not console.color_system))
    for remark in remarks:
        console.print(Text(remark))


class RowPlaces:
    """Where rows of the training data stand at their source: raw ones in the dataset, not in the cache."""

    def __init__(self, config: SFTConfig, stores: Sequence[Store]) -> None:
        """``stores`` are those of ``open_train``."""
        self._sources = config.train_sources
        self._fetch = partial(fetch, **cache_settings(config))
        self._stores = stores
        self._mixture = Mixture(stores)
        self._raw: dict[int, RawRows] = {}

    def locate(self, number: int) -> str:
        """File and line or row of the row with that ``number``, over all sources in their order."""
        source = int(self._mixture.source_of(number))
        place = self._mixture.locate(number)
        if self._sources[source].pretokenized:
            return place
        if source not in self._raw:
            path, split = self._sources[source].path, self._sources[source].split
            self._raw[source] = open_rows(path, split=split, fetch=self._fetch)
        shard, _, row = place.rpartition(", row ")
        with pa.memory_map(shard) as file:
            raw_row = pa.ipc.open_file(file).read_all()["raw_row"][int(row)].as_py()
        return self._raw[source].describe(raw_row)


def _remarks(store: Store) -> Iterator[str]:
    """What a reader of its rows should know: how they were read, and what is not among them."""
    if store.manifest:
        yield from (f"{store.name}: {notice}" for notice in store.manifest.notices)
    examples = store.manifest.drop_examples if store.manifest else {}
    for reason, count in store.report.dropped.items():
        example = f", such as {examples[reason]}" if reason in examples else ""
        yield f"{store.name}: {count:,} rows dropped as {reason}{example}"


def _chosen(num_rows: int, *, row: int | None, sample: int | None, seed: int) -> Sequence[int]:
    if row is not None:
        if not 0 <= row < num_rows:
            raise DataError("row", f"there is no row {row}", fix=f"give 0 to {num_rows - 1}")
        return [row]
    if sample is None:
        return range(min(_SHOWN, num_rows))
    drawn = np.random.default_rng(seed).choice(num_rows, size=min(sample, num_rows), replace=False)
    return [int(number) for number in drawn]


def _captions(images: Images | None, vision: VisionCard | None) -> Iterator[str]:
    """The size of each image in pixels, its grid of patches, and how many tokens stand for it."""
    if images is None or vision is None:
        return
    for number, (time, height, width) in enumerate(images.grid_thw.tolist()):
        pixels = f"{height * vision.patch_size} x {width * vision.patch_size} pixels"
        tokens = time * height * width // vision.merge_size**2
        yield f"image {number}: {pixels}, grid {time} x {height} x {width}, {tokens} placeholder tokens"


def _figures(images: Images | None, vision: VisionCard | None, reader: ImageReader | None) -> str:
    """The images as the model sees them, each over its caption."""
    if images is None or reader is None:
        return ""
    figures = ""
    for picture, caption in zip(reader.pictures(images), _captions(images, vision), strict=True):
        figures += f'<figure><img src="{picture_uri(picture)}"><figcaption>{caption}</figcaption></figure>'
    return figures


def _grouped(example: Example, tokenizer: Any, vision: VisionCard | None) -> Iterator[tuple[bool, Iterator[TextSpan]]]:
    """The spans of ``example``, those together that are targets, and those that are not."""
    spans = decoded_spans(example, tokenizer=tokenizer, image_token_id=vision.image_token_id if vision else None)
    return groupby(spans, key=attrgetter("trained"))


def _as_text(example: Example, tokenizer: Any, vision: VisionCard | None, *, marked: bool) -> Text:
    """Targets in green, special tokens dim; where there is no colour (``marked``), targets between ⟦ and ⟧."""
    text = Text()
    for targets, spans in _grouped(example, tokenizer, vision):
        text.append("⟦" if targets and marked else "")
        for span in spans:
            text.append(span.text, style=("green" if targets else "") + (" dim" if span.special else ""))
        text.append("⟧" if targets and marked else "")
    return text


def _as_html(example: Example, tokenizer: Any, vision: VisionCard | None) -> str:
    page = ""
    for targets, spans in _grouped(example, tokenizer, vision):
        text = "".join(f"<b>{markup.escape(s.text)}</b>" if s.special else markup.escape(s.text) for s in spans)
        page += f"<mark>{text}</mark>" if targets else text
    return f"<pre>{page}</pre>"
