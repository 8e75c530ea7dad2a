"""Spans of a text become a mask over its tokens.

The rule: where each token lies is proven, by the bytes of all tokens together or by decoding what is masked.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from burnish.data.encoder import Encoder, Ids
from burnish.data.example import IntArray
from burnish.data.frames import UnprovenError
from burnish.data.template import Span

Mask: TypeAlias = NDArray[np.uint8]

METASPACE = "\u2581"


class TokenMasker:
    """Masks for what one fast tokenizer of transformers makes of texts."""

    def __init__(self, tokenizer: Any, encoder: Encoder) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._normalizer = tokenizer.backend_tokenizer.normalizer
        self._bytes = _token_bytes(tokenizer.backend_tokenizer)
        self._sizes = np.array([len(token) for token in self._bytes], np.int64)
        self.notices: set[str] = set()
        """What a user should know of the rows so far."""

    def mask(self, text: str, spans: Sequence[Span], ids: Ids) -> Mask:
        """[length] 1 for each token with a character in a span; a token that straddles its start is in.

        Args:
            text: what was encoded.
            spans: in order, not overlapping.
            ids: of ``text``.

        Raises:
            UnprovenError: where the tokens lie cannot be proven, or one runs past the end of a span into other text.
        """
        raw = text.encode()
        places = self._proven_places(raw, ids)
        if places is None:
            return self._mask_by_offsets(text, spans, ids)
        starts, ends = places
        mask = np.zeros(len(ends), np.uint8)
        for start, stop in _to_bytes(text, spans):
            first = int(np.searchsorted(ends, start, "right"))
            last = int(np.searchsorted(starts, stop, "left"))
            if last > first and ends[last - 1] > stop:
                self._check_overhang(raw[stop : ends[last - 1]].decode(errors="replace"))
            mask[first:last] = 1
        return mask

    def _proven_places(self, raw: bytes, ids: Ids) -> tuple[IntArray, IntArray] | None:
        """Where each token starts and ends in ``raw``; ``None`` unless the tokens' bytes are exactly the text's."""
        joined = b"".join(map(self._bytes.__getitem__, ids.tolist()))
        # Some tokenizers put one blank before the text.
        lead = 1 if joined[:1] == b" " and len(joined) == len(raw) + 1 else 0
        if joined[lead:] != raw:
            return None
        sizes = self._sizes[ids]
        ends = np.cumsum(sizes) - lead
        return ends - sizes, ends

    def _mask_by_offsets(self, text: str, spans: Sequence[Span], ids: Ids) -> Mask:
        """For tokenizers that change the text; each masked run is decoded and compared with its span."""
        own_ids, edges = self._encoder.encode_with_offsets(text)
        if not np.array_equal(own_ids, ids):
            raise UnprovenError("the tokenizer's own engine gives other ids than the faster one")
        # The start of a token's offsets can be cut to its letters; the furthest end so far is never wrong.
        starts, ends = edges[:, 0], np.maximum.accumulate(edges[:, 1])
        mask = np.zeros(len(ends), np.uint8)
        for start, stop in spans:
            first = int(np.searchsorted(ends, start, "right"))
            last = int(np.searchsorted(ends, stop, "right"))
            if last < len(ends) and starts[last] < stop < ends[last]:
                self._check_overhang(text[stop : ends[last]])
                last += 1
            straddles = first < last and bool(starts[first] < start)
            self._check_decoded(ids[first:last].tolist(), text[start:stop], straddles=straddles)
            mask[first:last] = 1
        return mask

    def _check_decoded(self, ids: Sequence[int], wanted: str, *, straddles: bool) -> None:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found, expected = self._comparable(decoded), self._comparable(wanted)
        if found != expected and not (straddles and found.endswith(expected)):
            raise UnprovenError(f"its tokens decode to {found[-40:]!r}, the turn says {expected[-40:]!r}")

    def _comparable(self, text: str) -> str:
        """Without what a decoder may lose: blanks at special tokens, and what the normalizer changes."""
        normal = text if self._normalizer is None else self._normalizer.normalize_str(text)
        return "".join(normal.replace(METASPACE, " ").split())

    def _check_overhang(self, overhang: str) -> None:
        if overhang.strip():
            raise UnprovenError(f"a token runs past the end of the turn, into {overhang[:20]!r}")
        self.notices.add("the token that ends a turn holds the blanks after it too; it is trained")


def _token_bytes(backend: Any) -> list[bytes]:
    """[vocabulary] the bytes of the text that each token stands for."""
    layout = json.loads(backend.to_str())
    decoder = json.dumps(layout.get("decoder"), ensure_ascii=False)
    added = {token["id"] for token in layout["added_tokens"]}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values()) + 1)
    for token, number in vocabulary.items():
        if number in added:
            table[number] = token.encode()
        elif '"ByteLevel"' in decoder:
            table[number] = _byte_level(token)
        elif '"ByteFallback"' in decoder and len(token) == 6 and token.startswith("<0x"):
            table[number] = bytes([int(token[3:5], 16)])
        else:
            table[number] = (token.replace(METASPACE, " ") if METASPACE in decoder else token).encode()
    return table


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_LETTERS).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # not written in this alphabet


def _byte_letters() -> dict[int, int]:
    """The byte of each letter in which GPT-2's byte-level alphabet writes it: printable ones stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    no_letters = dict.fromkeys(others, 0xFFFF)
    return {byte: byte for byte in printable} | no_letters | {256 + i: byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()
"""Code points by code point, for ``str.translate``."""


def _to_bytes(text: str, spans: Sequence[Span]) -> list[Span]:
    """Places counted in UTF-8 bytes instead of characters."""
    if text.isascii():
        return list(spans)
    found, done, size = [], 0, 0
    for span in spans:
        places = []
        for place in span:
            size += len(text[done:place].encode())
            done = place
            places.append(size)
        found.append((places[0], places[1]))
    return found
