"""Fixed sets of words that keys hold, where more than one place reads them. Every floor may import them."""

from enum import StrEnum
from typing import Literal, TypeAlias

Dtype: TypeAlias = Literal["bfloat16", "float32"]
ModelPart: TypeAlias = Literal["vision", "projector", "language"]


class TrainOnWhat(StrEnum):
    """Which assistant turns are targets, each with the token that closes it."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"


class Truncation(StrEnum):
    """What happens to a text row longer than ``max_length``: cut at its end, dropped, or the run stops."""

    RIGHT = "right"
    DROP = "drop"
    ERROR = "error"


class Schedule(StrEnum):
    """The shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    INVERSE_SQRT = "inverse_sqrt"


class TrackerName(StrEnum):
    """Where metrics go beside ``metrics.jsonl``."""

    CONSOLE = "console"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class Purpose(StrEnum):
    """What a config is read for; it decides which data it must name."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    TOKENIZE = "tokenize"
    BENCH = "bench"
