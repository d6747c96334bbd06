"""Ports: is it free, who holds it, and which ones may an engine have.

Everything here only looks. A port that is taken is the user's to free: nothing is ever killed for it.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable
from pathlib import Path

from .errors import PortInUseError

Address = tuple[str, int]
"""A host and a port."""

# Below Linux's default ephemeral range (32768 and up): an engine binds its ports many seconds after they
# were chosen, and until then a port from that range could become the local end of anybody's connection.
FIRST, LAST = 20000, 32000
LISTEN = "0A"  # /proc/net/tcp's code for a listening socket


def require_free(addresses: Iterable[Address]) -> None:
    """Raise one `PortInUseError` that names every taken address and, where /proc tells, its holder."""
    taken = [(host, port) for host, port in addresses if not is_free(host, port)]
    if taken:
        raise PortInUseError("; ".join(f"port {port} on {host} is in use{_by(port)}" for host, port in taken))


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. An address that is not ours counts as not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different free ports, at random so that two launchers rarely meet."""
    chosen: list[int] = []
    for port in random.sample(range(FIRST, LAST), LAST - FIRST):
        if len(chosen) == count:
            return chosen
        if is_free(host, port):
            chosen.append(port)
    raise PortInUseError(f"fewer than {count} free ports between {FIRST} and {LAST} on {host}")


def holders(port: int) -> list[tuple[int, str]]:
    """(pid, command) of every process that listens on this TCP port and that we may look at."""
    inodes = _listening_inodes(port)
    pids = [entry for entry in os.listdir("/proc") if entry.isdigit() and inodes]
    return [(int(pid), _command(pid)) for pid in pids if inodes & _socket_inodes(pid)]


def _by(port: int) -> str:
    who = holders(port)
    if not who:
        return " (by a process this user may not look at)"
    return " by " + ", ".join(f"pid {pid} ({command})" for pid, command in who)


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _socket_inodes(pid: str) -> set[str]:
    inodes = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:  # gone meanwhile, or another user's
        pass
    return inodes


def _command(pid: str) -> str:
    try:
        words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    text = b" ".join(words).decode(errors="replace").strip()
    return text if len(text) <= 120 else text[:117] + "..."
