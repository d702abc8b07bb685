"""Ports for servers that tests start."""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which nobody else gets while it is open.

    It does not listen, so connections are refused until a server does.  A server may bind the same
    port if it sets ``SO_REUSEADDR``, as servers do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
