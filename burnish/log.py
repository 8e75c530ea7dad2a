"""Logging: one logger a module; rank 0 speaks, the others only warn."""

import logging
import sys


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; call it as ``log = get_logger(__name__)``."""
    return logging.getLogger(name)


def configure_logging(*, rank: int, level: str = "INFO") -> None:
    """Send this process's log to stderr; ranks other than 0 keep warnings and errors only.

    Standard output belongs to a command's result: with ``--json`` it holds one JSON object and nothing else.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s" if rank == 0 else f"rank {rank} %(message)s"))
    logger = logging.getLogger("burnish")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level if rank == 0 else "WARNING")
