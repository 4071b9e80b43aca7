"""A socket for a server of ours: had before anything else is done, or refused in one sentence."""

from __future__ import annotations

import errno
import os
import socket

from blendkv.errors import StoreError

BACKLOG = 1024
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Names of this machine that no other machine reaches."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        StoreError: if it cannot be had, in one sentence.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise StoreError(f"--host {host}: {error.strerror or error}; 127.0.0.1 is this machine alone") from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            advice = "somebody listens there already; choose another one with --port (0 takes a free one)"
        elif error.errno == errno.EACCES:
            advice = "this user may not; choose one above 1023 with --port"
        else:
            advice = f"{error.strerror or error}; look at --host and --port"
        raise StoreError(f"cannot listen on port {port} of {host}: {advice}") from error
    made.setblocking(False)
    return made
