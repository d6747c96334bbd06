"""Reading many sockets in one task.

A task that waits for its own socket costs a wake-up for every event: its registration with the kernel is made anew,
the scheduler takes it up, and every coroutine between its root and the read is gone through. Of a stream's event that
is half of what it costs the relay. Here all those sockets are read by one task, which hands on what came.

Who gets it is called in this task and must neither raise nor wait. Where the system has no epoll the hub never runs,
and everybody reads in a task of their own, as they do when it has ended.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

import trio

from trio_pdproxy.engines.wire import READ_SIZE

BATCH = 64
"""Sockets read before others have their turn."""


class Reader(Protocol):
    """For whom a socket is read."""

    def came(self, data: bytes) -> None:
        """This has come, or `b""`: the end. Called again and again until the reader is removed."""
        ...

    def failed(self, error: OSError) -> None:
        """The socket could not be read, and will not tell why again."""
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
        """Read until cancelled."""
        if not hasattr(select, "epoll"):
            return
        with select.epoll() as epoll:
            self._epoll = epoll
            try:
                while True:
                    await trio.lowlevel.wait_readable(epoll.fileno())
                    for fd, _ in epoll.poll(0, BATCH):
                        if (reader := self._readers.get(fd)) is None:
                            continue  # one before it in the batch has removed it
                        try:
                            data = os.read(fd, READ_SIZE)
                        except BlockingIOError:
                            continue
                        except OSError as error:
                            reader.failed(error)
                        else:
                            reader.came(data)
            finally:
                self._epoll = None
                readers, self._readers = self._readers, {}
                for reader in readers.values():
                    reader.stopped()

    def add(self, fd: int, reader: Reader) -> None:
        """Read that socket for `reader`. Only while `running`; one reader a socket, and nobody else reads meanwhile."""
        assert self._epoll is not None
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = reader

    def remove(self, fd: int) -> None:
        """No more reads of that socket; nothing happens where there were none. Before the socket is closed: its
        number may then be another's."""
        if self._readers.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)
