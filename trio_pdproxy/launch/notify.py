"""Telling systemd (`Type=notify`) where the launch is."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send `state` (READY=1, STOPPING=1, STATUS=...) to $NOTIFY_SOCKET. False where nobody asked for it, or listens."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(1)
            sock.sendto(state.encode(), address)
    except OSError:
        return False
    return True
