"""Texts become ids in batches, by the tokenizer's own engine or by a faster one that gave the same ids on this data.

The rule: the faster engine is used only where it was compared; offsets always come from the tokenizer's own.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from burnish.log import get_logger

log = get_logger(__name__)

Ids: TypeAlias = NDArray[np.int32]
Offsets: TypeAlias = NDArray[np.int64]


class Encoder:
    """Encodes rendered conversations, in which special tokens are written out."""

    def __init__(self, backend: Any) -> None:
        """Encode with ``backend``, a tokenizer of the library ``tokenizers``."""
        self._backend = backend
        self._fast: Any = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        if not texts:
            return []
        return self._own_ids(texts) if self._fast is None else _fast_ids(self._fast, texts)

    def encode_with_offsets(self, text: str) -> tuple[Ids, Offsets]:
        """The ids, and [length, 2] the characters that each is made from, as far as the tokenizer knows."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def try_fast(self, texts: Sequence[str]) -> bool:
        """Use gigatoken from here on where it gives the same ids for all ``texts``."""
        try:
            self.use_fast()
            found = self.encode(texts)
        except (RuntimeError, ValueError, TypeError) as error:
            self._fast = None
            log.info("gigatoken cannot be used, so the tokenizer's own engine is: %s", str(error).partition("\n")[0])
            return False
        num_other = sum(not np.array_equal(a, b) for a, b in zip(found, self._own_ids(texts), strict=True))
        if num_other:
            self._fast = None
            log.info("gigatoken gives other ids for %d of %d rows, so it is not used", num_other, len(texts))
            return False
        log.info("gigatoken gives the same ids for %d rows all over the data, so it encodes the rest", len(texts))
        return True

    def use_fast(self) -> None:
        """Use gigatoken from here on, as another process found that it gives the same ids."""
        import gigatoken

        self._fast = gigatoken.Tokenizer(self._backend)

    def _own_ids(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


def fast_engine_installed() -> bool:
    """Whether there is a faster engine at all."""
    return find_spec("gigatoken") is not None


def _fast_ids(engine: Any, texts: Sequence[str]) -> list[Ids]:
    layout = engine.encode_batch(list(texts), parallel=False).layout  # processes share the cores already
    ids = np.asarray(layout.content.data).astype(np.int32)
    return np.split(ids, np.asarray(layout.offsets.data)[1:-1])
