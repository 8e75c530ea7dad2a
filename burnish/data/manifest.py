"""What a store says of itself: written beside the rows by ``burnish tokenize``, compared with the model on opening."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from burnish.errors import DataError
from burnish.storage.files import File, read_bytes

FORMAT_VERSION = 1
MANIFEST_NAME = "_burnish_manifest.json"
"""Underscore-prefixed, so that no reader of the rows takes it for a shard."""

_TOKENIZE_AGAIN = "tokenize the data again with burnish tokenize"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts of a tokenized store."""

    rows: int
    """Rows in the store."""
    rows_read: int
    """Raw rows it was made from."""
    dropped: dict[str, int]
    """Raw rows that are not in the store, by reason."""
    drop_examples: dict[str, str]
    """For each reason, where and what the first dropped row was."""
    tokens: int
    targets: int
    tokenizer_hash: str
    """Of everything in the tokenizer that decides ids."""
    template_hash: str
    """Of the chat template's text and its kwargs."""
    vocabulary_size: int
    special_tokens: dict[str, str]
    """Such as ``{"eos_token": "<|im_end|>"}``."""
    max_length: int | None
    train_on_what: str
    notices: tuple[str, ...]
    """What a user should know of how the rows were read."""
    checksums: dict[str, str]
    """SHA-256 of each data file, by its path in the store."""
    format_version: int = FORMAT_VERSION


def read_manifest(file: File) -> Manifest:
    """The manifest that ``file`` holds.

    Raises:
        DataError: it is damaged, or of a format that this version does not read.
    """
    try:
        manifest = Manifest(**json.loads(read_bytes(file)))
    except (ValueError, TypeError) as error:
        raise DataError(file.uri, f"is no manifest of a store ({error})", fix=_TOKENIZE_AGAIN) from error
    if manifest.format_version != FORMAT_VERSION:
        problem = f"has format {manifest.format_version}; this version reads {FORMAT_VERSION}"
        raise DataError(file.uri, problem, fix=_TOKENIZE_AGAIN)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest`` into ``folder``."""
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True))


def require_same(
    store: str, manifest: Manifest, *, tokenizer_hash: str, template_hash: str, vocabulary_size: int
) -> None:
    """Refuse a store that was tokenized with another tokenizer or chat template than the model's.

    Raises:
        DataError: shows both sides of all that differs.
    """
    model = {
        "tokenizer_hash": tokenizer_hash,
        "template_hash": template_hash,
        "vocabulary_size": vocabulary_size,
    }
    its = {key: value for key, value in asdict(manifest).items() if key in model}
    differing = [f"{key} {its[key]} in the store, {model[key]} of the model" for key in model if its[key] != model[key]]
    if differing:
        raise DataError(
            store,
            "was tokenized for another model: " + "; ".join(differing),
            fix="tokenize it again for this model, or write allow_store_mismatch=true if you know that the ids agree",
        )
