"""Putting a leg's request on the wire: its first piece at once, the rest with an ear for the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from trio_pdproxy.engines.wire import BrokenError, Connection

T = TypeVar("T")

FIRST_SEND = 64 * 1024
"""Bytes of a request in its first send: the rest of a large one must not keep the other leg waiting."""

EARLY_ANSWER = 0.2
"""Seconds for an answer that an engine may have given before it closed on the rest of a request."""


def send_at_once(connection: Connection, data: memoryview) -> int:
    """What the kernel takes of the first send of a request without waiting, 0 where it takes none. Raises nothing:
    `send_first` finds out what is wrong."""
    try:
        return connection.send_now(data[:FIRST_SEND])
    except BrokenError:
        return 0


async def send_first(connection: Connection, data: memoryview) -> int:
    """The first send of a request; how much of it went out. No checkpoint where the kernel takes it at once. Raises
    `BrokenError`."""
    if sent := connection.send_now(data[:FIRST_SEND]):
        return sent
    await connection.send(data[:FIRST_SEND])
    return min(FIRST_SEND, len(data))


async def send_or_hear(connection: Connection, data: memoryview, hear: Callable[[], Awaitable[T]]) -> T | None:
    """Send the rest of a request, unless `hear` (reading the answer) returns first: what it has heard, else None.

    An engine may answer (413, say) before it has read all of a large request, and then close, or read no more. Its own
    word is better than a broken connection or a deadline. `hear` must be one that can be called again after a
    cancellation. Raises `BrokenError` where the connection broke and nothing was heard.
    """
    if not data:
        return None
    heard: T | None = None
    broken: BrokenError | None = None

    async def listen() -> None:
        nonlocal heard, broken
        try:
            heard = await hear()
        except BrokenError as error:
            broken = error
        nursery.cancel_scope.cancel("the engine has answered")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        try:
            await connection.send(data)
        except BrokenError as error:
            broken = error
            nursery.cancel_scope.deadline = trio.current_time() + EARLY_ANSWER
        else:
            nursery.cancel_scope.cancel("all is sent")
    if heard is None and broken is not None:
        raise broken
    return heard
