"""A sampler of your own: short rows first.

Any class will do that is built as `Class(dataset, **sampler_kwargs)` and has the five methods below. It must draw the same rows
in every process, so it may depend on its arguments alone; a constructor that takes `lengths` gets the rows of each source.
"""

import numpy as np


class ShortFirst:
    """The first epoch goes through groups of rising length, shuffled within; the later ones are shuffled as a whole."""

    def __init__(self, dataset, groups=4, seed=42):
        self.by_length = np.argsort(dataset.lengths, kind="stable")  # tokens of each row; num_patches tells images
        self.groups = groups
        self.seed = seed
        self.drawn = 0

    def __len__(self):
        """Rows an epoch draws."""
        return len(self.by_length)

    def __iter__(self):
        """What is left of the epoch; when nothing is, the next one."""
        epoch, position = divmod(self.drawn, len(self))
        random = np.random.default_rng([self.seed, epoch])
        groups = np.array_split(self.by_length, self.groups if epoch == 0 else 1)
        for row in np.concatenate([random.permutation(group) for group in groups])[position:]:
            self.drawn += 1  # before the yield: the state is taken right after a draw
            yield int(row)

    def state_dict(self):
        """Kept in checkpoints; JSON."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        """Go on from there."""
        self.drawn = state["drawn"]
