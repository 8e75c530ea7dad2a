"""Ports of loopback for servers that must be told one before they start."""

import random
import socket
from contextlib import ExitStack, suppress

FIRST, END = 20_000, 30_000
"""Below the range that the system hands to whoever connects, so that they are still free when they are used."""


def free_ports(count: int) -> list[int]:
    """So many different ones that nobody listens on."""
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(FIRST, END)))
                ports.append(probe.getsockname()[1])
    return ports
