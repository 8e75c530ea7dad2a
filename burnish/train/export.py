"""Hugging Face folders ``global_step_N`` of a run, in a folder or a bucket. Training waits for them.

In a bucket the model's config comes last, so that what has none was not written to its end.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from burnish.backends.base import Backend
from burnish.backends.comm import Ranks
from burnish.storage.files import is_remote
from burnish.storage.transfer import clear, upload
from burnish.train.cadence import Cadence
from burnish.train.checkpoint_bucket import staging_folder
from burnish.train.checkpoint_files import folder_name, on_disk

_LAST = "config.json"


@dataclass(frozen=True, slots=True)
class Exporter:
    """Writes ``{place}/global_step_N`` when due."""

    place: str
    """A folder, or an s3:// or gs:// URI."""
    cadence: Cadence
    ranks: Ranks
    cache_dir: str | None = None
    """Where it is written before it goes to a bucket; none is the user's cache."""

    def export(self, backend: Backend, *, step: int) -> None:
        """Write the weights of ``step``.

        Raises:
            BurnishError: the disk is full, or the bucket does not take it.
        """
        target = f"{self.place.rstrip('/')}/{folder_name(step)}"
        if not is_remote(target):
            with on_disk(Path(target)):
                backend.export(Path(target))
            return
        staged = staging_folder(target, cache_dir=self.cache_dir)
        with on_disk(staged):
            shutil.rmtree(staged, ignore_errors=True)
            backend.export(staged)

        def send() -> None:
            if self.ranks.rank == 0:
                clear(target, last="")
                upload(staged, target, last=_LAST)
                shutil.rmtree(staged, ignore_errors=True)

        self.ranks.of_each(send, meeting=f"export {step}")
