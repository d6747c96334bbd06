"""Waiting for what a test cannot be told of: the state of an engine, of a process, of another library."""

from __future__ import annotations

from collections.abc import Callable

import trio


async def until(holds: Callable[[], object], seconds: float = 5.0, *, step: float = 0.005) -> None:
    """Look every `step` seconds until `holds()` is true; an AssertionError after `seconds`."""
    with trio.move_on_after(seconds):
        while not holds():  # noqa: ASYNC110  what is looked at sets no event
            await trio.sleep(step)
        return
    raise AssertionError(f"not within {seconds:g} s")
