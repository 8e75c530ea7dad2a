"""WHAT a run is. Frozen models, read once, never changed. No torch."""

from burnish.config.check import find_problems
from burnish.config.choices import Purpose, TrainOnWhat
from burnish.config.data import EvalSource, TrainSource
from burnish.config.read import load_config
from burnish.config.run import SFTConfig

__all__ = ["EvalSource", "Purpose", "SFTConfig", "TrainOnWhat", "TrainSource", "find_problems", "load_config"]
