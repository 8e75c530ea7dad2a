"""Ranks learn which of them is gone, and take nobody else for gone."""

import os
import socket
import time

from burnish.backends.comm import joined
from burnish.launch.contact import in_contact
from tests.ranks import on_ranks


def leave_together():
    with joined() as ranks, in_contact(ranks) as contact:
        time.sleep(1.5 * ranks.rank)  # slow is not dead
        ranks.meet("end")
        ranks.any([True])
    return contact.lost(within=0.5)


def listen_to_strangers():
    with joined() as ranks, in_contact(ranks) as contact:
        port = str(ranks.store.get("burnish/contact"), "utf-8").split()[0]
        for word in (b"", b"GET / HTTP/1.1\r\n\r\n.."):
            with socket.create_connection((os.environ["MASTER_ADDR"], int(port))) as stranger:
                stranger.sendall(word)
        lost = contact.lost(within=2)
        ranks.any([True])
        return lost


def test_all_leave_with_a_word():
    assert on_ranks(3, leave_together) == [None] * 3


def test_strangers_are_nobody():
    assert on_ranks(2, listen_to_strangers) == [None] * 2
