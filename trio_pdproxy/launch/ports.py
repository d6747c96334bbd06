"""Ports: is it free, who holds it, and which ones may an engine have.

Everything here only looks. A port that is taken is the user's to free: nothing is ever killed for it.
"""

from __future__ import annotations

import errno
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
    problems = [problem for host, port in addresses if (problem := _problem(host, port)) is not None]
    if problems:
        raise PortInUseError("; ".join(problems))


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. An address that is not ours counts as not free."""
    return _try(host, port) is None


def _problem(host: str, port: int) -> str | None:
    error = _try(host, port)
    if error is None:
        return None
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine"
    if error.errno == errno.EACCES:
        return f"this user may not listen on port {port} of {host}"
    return f"port {port} on {host} is in use{_by(port)}"


def _try(host: str, port: int) -> OSError | None:
    """What listening there now fails with."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of an earlier run in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def choose_run(length: int, host: str, taken: set[int]) -> int:
    """The first of so many consecutive free ports, at random so that two launchers rarely meet; noted in `taken`."""
    starts = range(FIRST, LAST - length + 1)
    for first in random.sample(starts, len(starts)):
        run = range(first, first + length)
        if taken.isdisjoint(run) and all(is_free(host, port) for port in run):
            taken.update(run)
            return first
    raise PortInUseError(f"no {length} consecutive free ports between {FIRST} and {LAST} on {host}")


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
