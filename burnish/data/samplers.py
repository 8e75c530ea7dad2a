"""In which order rows are drawn. State is a few integers; every order is a pure function of it and the seed.

The rule: all ranks draw the same numbers, so a sampler may depend on nothing that differs between them.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from burnish.data.permutation import permuted
from burnish.errors import DataError
from burnish.log import get_logger

log = get_logger(__name__)


class Sized(Protocol):
    """What a sampler needs to know of the rows."""

    def __len__(self) -> int: ...


@runtime_checkable
class Sampler(Protocol):
    """Draws global row numbers, epoch after epoch."""

    def __iter__(self) -> Iterator[int]:
        """What is left of the current epoch; when nothing is, the next epoch."""
        ...

    def __len__(self) -> int:
        """Draws of an epoch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands after the rows drawn so far, JSON-ready."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the draw after those of ``state``."""
        ...


@runtime_checkable
class Seekable(Protocol):
    """A sampler that needs no earlier draw to know a later one."""

    def seek(self, drawn: int) -> None:
        """Stand after the first ``drawn`` draws."""
        ...


class _CountingSampler:
    """Its state is how many rows it has drawn; ``draw`` gives the row of each draw, counted from 0."""

    def __init__(self, num_rows: int, *, draw: Callable[[int], int]) -> None:
        self._num_rows = num_rows
        self._draw = draw
        self._drawn = 0

    def __iter__(self) -> Iterator[int]:
        epoch_end = (self._drawn // self._num_rows + 1) * self._num_rows
        while self._drawn < epoch_end:
            self._drawn += 1
            yield self._draw(self._drawn - 1)

    def __len__(self) -> int:
        return self._num_rows

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = int(state["drawn"])

    def seek(self, drawn: int) -> None:
        """Stand after the first ``drawn`` draws."""
        self._drawn = drawn


class SequentialSampler(_CountingSampler):
    """Rows as stored."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows, draw=lambda number: number % num_rows)


class RandomSampler(_CountingSampler):
    """Each row once an epoch, in an order given by (seed, epoch)."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        super().__init__(num_rows, draw=_Reshuffled(num_rows, key=(seed, 0)).draw)


class DataMixingSampler:
    """Draws the sources in fixed shares; within a source each row once before any row again.

    The shares hold exactly in every window: after n draws a source with share w was drawn floor(n w) or ceil(n w)
    times. A source that is used up is shuffled anew. An epoch has as many draws as there are rows.
    """

    def __init__(self, dataset: Sized, *, lengths: Sequence[int], weights: Sequence[float], seed: int = 42) -> None:
        """Mix the sources of ``dataset``.

        Args:
            dataset: all rows, source after source.
            lengths: rows of each source.
            weights: relative share of each source, > 0; ``[8, 2]`` is ``[0.8, 0.2]``.
            seed: names the order.

        Raises:
            DataError: the weights are no positive numbers, or do not fit the sources.
        """
        _check_mix(len(dataset), lengths, weights)
        exact = [Fraction(str(weight)) for weight in weights]
        common = math.lcm(*(weight.denominator for weight in exact))
        self._shares = [int(weight * common) for weight in exact]
        self._spacing = [math.lcm(*self._shares) // share for share in self._shares]
        self._sources = [_Reshuffled(length, key=(seed, source)) for source, length in enumerate(lengths)]
        self._starts = [sum(lengths[:source]) for source in range(len(lengths))]
        self._num_rows = sum(lengths)
        self._counts = [0] * len(lengths)
        for source, length in enumerate(lengths):
            share = self._shares[source] / sum(self._shares)
            text = "source %d: %d rows, %.1f %% of the draws, passed %.2f times an epoch"
            log.info(text, source, length, 100 * share, share * self._num_rows / length)

    def __iter__(self) -> Iterator[int]:
        drawn = sum(self._counts)
        for number in range(drawn, (drawn // len(self) + 1) * len(self)):
            source = self._source_at(number)
            self._counts[source] += 1
            yield self._starts[source] + self._sources[source].draw(self._counts[source] - 1)

    def __len__(self) -> int:
        return self._num_rows

    def state_dict(self) -> dict[str, Any]:
        return {"counts": list(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["counts"]) != len(self._counts):
            raise DataError(
                "sampler", f"the state is of {len(state['counts'])} sources, the data of {len(self._counts)}"
            )
        self._counts = [int(count) for count in state["counts"]]

    def seek(self, drawn: int) -> None:
        """Stand after the first ``drawn`` draws.

        Only the last draws are gone through, about as many as the rarest source is drawn once in: from a start where
        what is due soonest counts as drawn, the order runs into the true one when all that was open there is drawn.
        """
        total = sum(self._shares)
        begin = max(0, drawn - total // min(self._shares) - 2)
        self._counts = [share * begin // total for share in self._shares]
        for number in (*[begin - 1] * (begin - sum(self._counts)), *range(begin, drawn)):
            self._counts[self._source_at(number)] += 1

    def _source_at(self, number: int) -> int:
        """Of the sources behind their share, the one whose next draw is due first (Steiner and Yeomans 1993).

        Integers only, so that no rounding ever turns the order.
        """
        total = sum(self._shares)
        behind = [s for s, count in enumerate(self._counts) if count * total < self._shares[s] * (number + 1)]
        return min(behind, key=lambda s: ((self._counts[s] + 1) * self._spacing[s], s))


def load_custom_sampler(
    class_path: str, *, dataset: Sized, kwargs: Mapping[str, Any], source_lengths: Sequence[int]
) -> Sampler:
    """Build ``Class(dataset, **kwargs)`` from its dotted path.

    Args:
        class_path: ``package.module.Class``.
        dataset: all rows, source after source.
        kwargs: of the constructor.
        source_lengths: rows of each source; of several they are passed as ``lengths`` where the constructor takes it.

    Raises:
        DataError: it cannot be imported, does not take ``kwargs``, or is no ``Sampler``.
    """
    module, _, name = class_path.rpartition(".")
    try:
        made = vars(import_module(module))[name]
        parameters = inspect.signature(made).parameters
        takes_lengths = "lengths" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        lengths = {"lengths": list(source_lengths)} if len(source_lengths) > 1 and takes_lengths else {}
        sampler = made(dataset, **{**lengths, **kwargs})
    except (ImportError, ValueError, KeyError, TypeError) as error:
        fix = f"give module.Class of a class in {Path.cwd()} or an installed package, made as Class(dataset, **sampler_kwargs)"
        raise DataError("sampler_class_path", f"{class_path!r} cannot be built: {error!r}", fix=fix) from error
    if not isinstance(sampler, Sampler):
        missing = [verb for verb in ("__iter__", "__len__", "state_dict", "load_state_dict") if not hasattr(made, verb)]
        raise DataError("sampler_class_path", f"{class_path!r} has no {', '.join(missing)}", fix="write these methods")
    return sampler


class _Reshuffled:
    """The draws of one source without end: every pass over it in another order."""

    BLOCK = 4096

    def __init__(self, size: int, *, key: tuple[int, int]) -> None:
        self._size = size
        self._key = key
        self._block: NDArray[np.int64] = np.empty(0, np.int64)
        self._place = (-1, -1)

    def draw(self, number: int) -> int:
        """The row of draw ``number``, counted from 0 through all passes."""
        turn, position = divmod(number, self._size)
        start = position - position % self.BLOCK
        if self._place != (turn, start):
            positions = np.arange(start, min(start + self.BLOCK, self._size))
            self._block = permuted(positions, size=self._size, key=(*self._key, turn))
            self._place = (turn, start)
        return int(self._block[position - start])


def _check_mix(num_rows: int, lengths: Sequence[int], weights: Sequence[float]) -> None:
    fix = "give each source one number > 0, such as [0.8, 0.2]"
    if isinstance(weights, str) or len(weights) != len(lengths):
        raise DataError("weights", f"{weights!r} for {len(lengths)} sources", fix=fix)
    for weight in weights:
        if not isinstance(weight, Real) or isinstance(weight, bool) or not 0 < weight < math.inf:
            raise DataError("weights", f"{weight!r} in {list(weights)!r} is no number > 0", fix=fix)
    for source, length in enumerate(lengths):
        if length < 1:
            raise DataError(f"source {source}", "has no rows to draw", fix="leave it out, or see why its rows dropped")
    if sum(lengths) != num_rows:
        raise DataError("lengths", f"{list(lengths)} are not the {num_rows} rows of the data", fix="give rows a source")
