"""The words a key may hold where it has a fixed set. Every floor may import them."""

from enum import StrEnum


class TrainOnWhat(StrEnum):
    """Which tokens of a conversation are targets."""

    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    """The last assistant turn and the end-of-turn token that closes it."""
    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    """Every assistant turn, each with the token that closes it."""


class Truncation(StrEnum):
    """What happens to a text row longer than ``max_length``."""

    RIGHT = "right"
    """Its end is cut off."""
    DROP = "drop"
    """It is dropped and counted as ``too_long``."""
    ERROR = "error"
    """The run stops and names it."""


class Schedule(StrEnum):
    """The shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    LINEAR = "linear"
    COSINE = "cosine"
    WSD = "wsd"
    INVERSE_SQRT = "inverse_sqrt"


class Strategy(StrEnum):
    """The backend that spreads the model."""

    FSDP = "fsdp"
    MEGATRON = "megatron"


class LauncherName(StrEnum):
    """Who starts the processes of a run."""

    LOCAL = "local"
    RAY = "ray"


class Attention(StrEnum):
    """How attention is computed."""

    AUTO = "auto"
    """The fastest that isolates packed rows on this device."""
    FLASH = "flash"
    FLEX = "flex"
    SDPA = "sdpa"


class Dtype(StrEnum):
    """Floating-point formats of weights and reductions."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class OptimizerName(StrEnum):
    """The update rule."""

    ADAMW = "adamw"


class SamplerName(StrEnum):
    """The order in which rows are drawn."""

    RANDOM = "random"
    SEQUENTIAL = "sequential"
    CUSTOM = "custom"
    """The class that ``sampler_class_path`` names."""


class ImageReading(StrEnum):
    """When images become pixels."""

    PIXELS = "pixels"
    """While the rows are tokenized; the store holds them."""
    LAZY = "lazy"
    """In the reader threads; the store holds where the image lies."""


class TrackerName(StrEnum):
    """Where metrics go beside ``metrics.jsonl``."""

    CONSOLE = "console"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"


class ModelPart(StrEnum):
    """A part of a vision-language model."""

    VISION = "vision"
    PROJECTOR = "projector"
    LANGUAGE = "language"


class Purpose(StrEnum):
    """What a config is read for; it decides which data it must name."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    TOKENIZE = "tokenize"
