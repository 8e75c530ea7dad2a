"""What only the run knows of its data, kept for its page: counts of every source and a few rows, in ``data.json``.

The rule: it costs a few rows, never all of them, and a row that cannot be shown never ends the run.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from burnish.data.example import Images
from burnish.data.pictures import ImageReader, picture_uri
from burnish.data.spans import decoded_spans
from burnish.data.store import Store, StoreReport
from burnish.errors import without_secrets
from burnish.log import get_logger

log = get_logger(__name__)

CONFIG_FILE, DATA_FILE = "config.yaml", "data.json"
_SAMPLES, _MOST_SAMPLES = 4, 8
"""Rows shown; the second where there are so many sources, one of each."""
_LONGEST, _MOST_SPANS = 400, 200
"""Tokens of a span, and spans of a row."""
_MOST_IMAGES, _SIDE = 8, 160
"""Images of a row, and pixels of their longer side."""


class Sample(BaseModel):
    """A row of the training data."""

    source: str
    row: int
    """Its number over all sources, as in ``burnish inspect rows row=N``."""
    tokens: int
    targets: int
    spans: list[tuple[str, bool]]
    """Text, and whether it is trained; of long spans the two ends."""
    images: list[Annotated[str, Field(pattern="^data:image/png;base64,[A-Za-z0-9+/]+=*$")]]
    """The first ones, small."""


class Facts(BaseModel):
    """The content of ``data.json``."""

    sources: list[StoreReport] = []
    eval_sources: list[StoreReport] = []
    samples: list[Sample] = []


def write_facts(
    folder: Path,
    *,
    stores: Sequence[Store],
    evals: Mapping[str, Store],
    tokenizer: Callable[[], Any],
    reader: Callable[[], ImageReader],
    image_token_id: int | None,
    seed: int,
) -> None:
    """Write ``DATA_FILE`` to ``folder``, without samples and with a warning where one cannot be read.

    Args:
        folder: of the run.
        stores: the training data.
        evals: the evaluation sets.
        tokenizer: called where there are ``stores``.
        reader: called where these have images.
        image_token_id: placeholder of images; ``None`` for a model without.
        seed: draws the samples.
    """
    samples = []
    try:
        decoded = {"tokenizer": tokenizer(), "image_token_id": image_token_id} if stores else {}
        samples = [_sample(stores, *place, decoded=decoded, reader=reader) for place in _drawn(stores, seed)]
    except Exception as error:  # noqa: BLE001 - only a page lacks them; whatever is wrong with a row, its step will say
        log.warning("no rows are kept for the report: %s", error)
    facts = Facts(
        sources=[_counts(store) for store in stores],
        eval_sources=[_counts(store) for store in evals.values()],
        samples=samples,
    )
    (folder / DATA_FILE).write_text(json.dumps(facts.model_dump()), encoding="utf-8")


def _counts(store: Store) -> StoreReport:
    return replace(store.report, name=without_secrets(store.name))


def _drawn(stores: Sequence[Store], seed: int) -> Iterator[tuple[int, int]]:
    """Source and row in it, the sources in turn."""
    draw = np.random.default_rng(seed)
    wanted = min(max(_SAMPLES, len(stores)), _MOST_SAMPLES)
    for source, store in enumerate(stores[:wanted]):
        share = len(range(source, wanted, len(stores)))
        yield from ((source, int(row)) for row in draw.choice(len(store), min(share, len(store)), replace=False))


def _sample(
    stores: Sequence[Store], source: int, row: int, *, decoded: Mapping[str, Any], reader: Callable[[], ImageReader]
) -> Sample:
    store = stores[source]
    example = store[row]
    spans = list(decoded_spans(example, longest=_LONGEST, **decoded))
    merged = [
        ("".join(span.text for span in group), trained)
        for trained, group in groupby(spans[:_MOST_SPANS], key=attrgetter("trained"))
    ]
    return Sample(
        source=without_secrets(store.name),
        row=sum(map(len, stores[:source])) + row,
        tokens=int(store.lengths[row]),
        targets=int(store.target_counts[row]),
        spans=merged + ([(f" [… {len(spans) - _MOST_SPANS:,} spans …]", False)] if len(spans) > _MOST_SPANS else []),
        images=_thumbnails(example.images, reader) if example.images else [],
    )


def _thumbnails(images: Images, reader: Callable[[], ImageReader]) -> list[str]:
    pictures = zip(reader().pictures(images), range(_MOST_IMAGES), strict=False)
    return [picture_uri(picture, largest=_SIDE) for picture, _ in pictures]
