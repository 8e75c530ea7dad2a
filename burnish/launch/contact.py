"""Ranks that notice at once when one of them is gone, whatever they wait for.

Every rank holds one connection to rank 0. The operating system closes it when a process dies, however it dies: whoever
is still there learns which rank was first, has a few seconds to end by itself, and is ended then. The rule: nobody is
taken for dead because it is slow.
"""

import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Lock, Thread

from burnish.backends.comm import Ranks
from burnish.log import get_logger

log = get_logger(__name__)

_TO_FAIL, _TO_END = 3.0, 5.0
"""Seconds in which a collective has failed because of the loss, and in which the process has then ended."""
_POLL_SECONDS, _TO_CONNECT = 1.0, 10.0
_HELLO, _NUMBER = struct.Struct("!16si"), struct.Struct("!i")
_BYE = -1
_ADDRESS = "burnish/contact"


class Contact:
    """What this rank knows of the others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._lost: int | None = None
        self._known, self._left, self._saying = Event(), Event(), Lock()
        self._said = False
        self.at_loss: Callable[[], None] = lambda: None
        """Begun beside a main thread that has not ended by itself, and may hang; it has a few seconds."""

    def lost(self, *, within: float = 0.0) -> int | None:
        """The first rank that is gone without a word, as far as this one learns it ``within`` so many seconds."""
        self._known.wait(within)
        return self._lost

    def say_lost(self) -> None:
        """Say in one line, once, which rank is gone."""
        with self._saying:
            if not self._said:
                self._said = True
                log.error("%slost contact with rank %d", "rank 0 " if self.rank == 0 else "", self._lost)

    def leave(self) -> None:
        """From now on the others may go."""
        self._left.set()

    def lose(self, rank: int) -> None:
        """Note that ``rank`` is gone, and end this process unless it ends by itself."""
        if self._left.is_set():
            return
        self._lost = rank
        self._known.set()
        if not self._left.wait(_TO_FAIL):
            self.say_lost()
            os.kill(os.getpid(), signal.SIGTERM)  # wakes what waits in Python
            Thread(target=self.at_loss, daemon=True).start()
        if not self._left.wait(_TO_END):
            sys.stderr.flush()
            os._exit(1)

    @property
    def is_left(self) -> bool:
        """Whether this rank has no more to do with the others."""
        return self._left.is_set()


@contextmanager
def in_contact(ranks: Ranks) -> Iterator[Contact]:
    """The contact of this rank with the others while the block runs; it leaves with a word only if the block ends well."""
    contact = Contact(ranks.rank)
    if ranks.world_size == 1:
        yield contact
        return
    with _listening(ranks, contact) if ranks.rank == 0 else _connected(ranks, contact) as say_bye:
        ended_well = False
        try:
            yield contact
            ended_well = True
        finally:
            contact.leave()
            if ended_well:
                say_bye()
            else:
                _end_soon()


def _end_soon() -> None:
    """End this process in a few seconds, should it hang on its way out."""
    timer = threading.Timer(_TO_END, os._exit, (1,))
    timer.daemon = True
    timer.start()


@contextmanager
def _listening(ranks: Ranks, contact: Contact) -> Iterator[Callable[[], None]]:
    """Rank 0: every other rank has a connection to here."""
    token = secrets.token_bytes(8).hex()
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.create_server(
        ("", 0), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6
    ) as listener:
        ranks.store.set(_ADDRESS, f"{listener.getsockname()[1]} {token}")
        peers: dict[socket.socket, int] = {}
        Thread(target=_watch_all, args=(listener, token.encode(), peers, contact), daemon=True).start()
        try:
            yield lambda: _tell(peers, _BYE)
        finally:
            for peer in list(peers):
                peer.close()


def _watch_all(listener: socket.socket, token: bytes, peers: dict[socket.socket, int], contact: Contact) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while not contact.is_left:
            for key, _ in selector.select(_POLL_SECONDS):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is listener:
                    _admit(listener, token, peers, selector)
                    continue
                word = _received(connection)
                selector.unregister(connection)
                rank = peers.pop(connection)
                connection.close()
                if word is None:
                    _tell(peers, rank)
                    contact.lose(rank)
                    return


def _admit(
    listener: socket.socket, token: bytes, peers: dict[socket.socket, int], selector: selectors.BaseSelector
) -> None:
    connection, _ = listener.accept()
    connection.settimeout(_POLL_SECONDS)
    hello = b""
    with suppress(OSError):
        hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    if len(hello) != _HELLO.size or _HELLO.unpack(hello)[0] != token:
        connection.close()  # a stranger
        return
    _keep_alive(connection)
    peers[connection] = _HELLO.unpack(hello)[1]
    selector.register(connection, selectors.EVENT_READ)


def _tell(peers: Iterable[socket.socket], number: int) -> None:
    for peer in list(peers):
        with suppress(OSError):
            peer.sendall(_NUMBER.pack(number))


@contextmanager
def _connected(ranks: Ranks, contact: Contact) -> Iterator[Callable[[], None]]:
    """Any other rank: one connection to rank 0."""
    ranks.store.wait([_ADDRESS], timedelta(seconds=60))
    port, token = str(ranks.store.get(_ADDRESS), "utf-8").split()
    try:
        connection = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=_TO_CONNECT)
        connection.sendall(_HELLO.pack(token.encode(), ranks.rank))
    except OSError as error:
        log.warning("port %s of rank 0 cannot be reached (%s): a dead rank is noticed late", port, error)
        yield lambda: None
        return
    connection.settimeout(None)
    _keep_alive(connection)
    with connection:
        Thread(target=_watch_first, args=(connection, contact), daemon=True).start()
        try:
            yield lambda: _tell([connection], _BYE)
        finally:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads


def _watch_first(connection: socket.socket, contact: Contact) -> None:
    word = _received(connection)
    if word != _BYE:
        contact.lose(0 if word is None else word)


def _received(connection: socket.socket) -> int | None:
    """The number that the other side sent; none when it is gone."""
    word = b""
    with suppress(OSError):
        word = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
    number: int | None = _NUMBER.unpack(word)[0] if len(word) == _NUMBER.size else None
    return number


def _keep_alive(connection: socket.socket) -> None:
    """Notice within half a minute a machine that has lost its power or its network."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
