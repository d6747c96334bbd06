"""Many sockets watched in one task."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator

import pytest
import trio

from trio_pdproxy.engines.hub import BATCH, Hub
from trio_pdproxy.engines.wire import READ_SIZE
from trio_pdproxy.testing import until


class Reading:
    def __init__(self, on_came: Callable[[Reading], None] = lambda reading: None) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.read = b""
        self.calls = 0
        self.stops = 0
        self.errors: list[OSError] = []
        self._on_came = on_came
        self._on_failed: Callable[[], None] = lambda: None

    @property
    def fd(self) -> int:
        return self.ours.fileno()

    def came(self, data: bytes) -> None:
        self.calls += 1
        self.read += data
        self._on_came(self)

    def failed(self, error: OSError) -> None:
        self.errors.append(error)
        self._on_failed()

    def stopped(self) -> None:
        self.stops += 1


@pytest.fixture
def readings() -> Iterator[list[Reading]]:
    made = [Reading() for _ in range(3 * BATCH)]
    yield made
    for reading in made:
        reading.ours.close()
        reading.theirs.close()


async def test_each_is_called_until_it_has_read_what_is_there(readings: list[Reading]) -> None:
    hub = Hub()
    assert not hub.running
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hub.run)
        await until(lambda: hub.running)
        for reading in readings:
            hub.add(reading.fd, reading)
        for number, reading in enumerate(readings):
            reading.theirs.send(b"%05d" % number)
            if number == 0:
                reading.theirs.send(b"0" * READ_SIZE)
        await until(lambda: sum(len(reading.read) for reading in readings) == 5 * len(readings) + READ_SIZE)
        assert [int(reading.read[:5]) for reading in readings] == list(range(len(readings)))
        assert [reading.calls for reading in readings] == [2] + [1] * (len(readings) - 1)
        nursery.cancel_scope.cancel("seen")
    assert not hub.running
    assert {reading.stops for reading in readings} == {1}
    hub.remove(readings[0].fd)  # does nothing any more


async def test_who_is_removed_is_not_called_even_in_the_batch_it_is_in(readings: list[Reading]) -> None:
    hub = Hub()
    pair = readings[:2]

    def remove_both(_: Reading) -> None:
        for reading in pair:
            hub.remove(reading.fd)

    for reading in pair:
        reading._on_came = remove_both
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hub.run)
        await until(lambda: hub.running)
        for reading in pair:
            reading.theirs.send(b"ab")
            hub.add(reading.fd, reading)
        await until(lambda: sum(reading.calls for reading in pair) > 0)
        await trio.sleep(0.05)
        assert sum(reading.calls for reading in pair) == 1
        other = readings[2]
        hub.add(other.fd, other)
        other.theirs.close()  # an end is something to read, again and again
        await until(lambda: other.calls > 1)
        nursery.cancel_scope.cancel("seen")
    assert [reading.stops for reading in readings[:3]] == [0, 0, 1]


async def test_a_reset_is_told_with_its_reason(readings: list[Reading]) -> None:
    hub = Hub()
    reading = readings[0]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        reading.ours.close()
        reading.theirs.close()
        reading.ours = socket.create_connection(listening.getsockname())
        reading.ours.setblocking(False)
        reading.theirs = listening.accept()[0]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hub.run)
        await until(lambda: hub.running)
        hub.add(reading.fd, reading)
        reading._on_failed = lambda: hub.remove(reading.fd)  # else its end would come next
        reading.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reading.theirs.close()
        await until(lambda: bool(reading.errors))
        assert isinstance(reading.errors[0], ConnectionResetError)
        nursery.cancel_scope.cancel("seen")
    assert (reading.calls, reading.stops) == (0, 0)
