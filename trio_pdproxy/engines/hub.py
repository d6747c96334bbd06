"""Waiting for many sockets in one task.

A task that waits for its own socket costs a wake-up for every event: its registration with the kernel is made anew,
the scheduler takes it up, and every coroutine between its root and the read is gone through. Of a stream's event that
is half of what it costs the relay. Here all those sockets are watched by one task, which calls whoever is to read.

The watched ones are called in this task and must neither raise nor wait. Where the system has no epoll the hub never
runs, and everybody reads in a task of their own, as they do when it has ended.
"""

from __future__ import annotations

import select
from typing import Protocol

import trio

BATCH = 64
"""Readers called before others have their turn."""


class Reader(Protocol):
    """Who reads a socket."""

    def ready(self) -> None:
        """There is something to read, an end or an error included. Called again and again until that is done, or
        until the reader is removed."""
        ...

    def stopped(self) -> None:
        """The hub has ended, and nothing will be called any more."""
        ...


class Hub:
    """See the module. `run` in a nursery that outlives its readers, or nobody is ever called."""

    def __init__(self) -> None:
        self._readers: dict[int, Reader] = {}
        self._epoll: select.epoll | None = None

    @property
    def running(self) -> bool:
        return self._epoll is not None

    async def run(self) -> None:
        """Call readers until cancelled."""
        if not hasattr(select, "epoll"):
            return
        with select.epoll() as epoll:
            self._epoll = epoll
            try:
                while True:
                    await trio.lowlevel.wait_readable(epoll.fileno())
                    for fd, _ in epoll.poll(0, BATCH):
                        if (reader := self._readers.get(fd)) is not None:  # else one before it in the batch removed it
                            reader.ready()
            finally:
                self._epoll = None
                readers, self._readers = self._readers, {}
                for reader in readers.values():
                    reader.stopped()

    def add(self, fd: int, reader: Reader) -> None:
        """Call `reader` whenever there is something to read. Only while `running`; one reader a socket."""
        assert self._epoll is not None
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def remove(self, fd: int) -> None:
        """No more calls for that socket; nothing happens where there were none. Before the socket is closed: its
        number may then be another's."""
        if self._readers.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)
