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
