"""The engines' log files: where an earlier run's go, and all of them followed as one stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import trio

FOLLOW_SECONDS = 0.2
MOST_AT_ONCE = 1024 * 1024
LONGEST_LINE = 64 * 1024


def put_away(folder: Path, names: Sequence[str]) -> None:
    """Keep each NAME.log of an earlier run as NAME.log.1, in place of the run's before it."""
    for name in names:
        log = folder / f"{name}.log"
        with suppress(FileNotFoundError):
            log.replace(log.with_name(f"{log.name}.1"))


async def follow(logs: Mapping[str, Path], show: Callable[[str, str], None]) -> None:
    """Call `show(name, line)` for every whole line that comes into the files, until cancelled.

    A file need not be there yet, and may begin anew. Lines of one file keep their order.
    """
    tails = {name: _Tail(path) for name, path in logs.items()}
    while True:
        for name, tail in tails.items():
            for line in await trio.to_thread.run_sync(tail.read):
                show(name, line)
        await trio.sleep(FOLLOW_SECONDS)


class _Tail:
    """What has come into a file since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        self.rest = b""

    def read(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self.at:
                    self.at, self.rest = 0, b""
                file.seek(self.at)
                data = file.read(MOST_AT_ONCE)
        except OSError:
            return []
        self.at += len(data)
        # A progress bar rewrites its line by carriage returns.
        *lines, self.rest = (self.rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            lines.append(self.rest)
            self.rest = b""
        return [line.decode(errors="replace") for line in lines if line.strip()]
