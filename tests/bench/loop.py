"""asyncio on uvloop, where it is installed: what is beside the proxies must not be the bottleneck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """None where there is no uvloop (asyncio's own loop is used, at about twice the cost)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` to its end; what it returns."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
