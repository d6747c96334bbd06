"""Several worker processes that are one proxy: `hypercorn trio_pdproxy:app --workers N`.

Whoever scrapes /metrics or asks for timelines reaches one of them and means them all. So each listens on a Unix socket
in a folder they share (named after their parent process and their settings, readable by this user alone), and the one
that is asked asks the others. Nothing is shared while requests are served, the gauges are as true as with one process,
and a worker that does not answer makes the scrape fail rather than the counters fall.

prometheus_client's own way (PROMETHEUS_MULTIPROC_DIR) has to be set up from outside, and shares counters only: what is
asked for at a scrape (places, debts, engines up) would be one worker's.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec
import trio

from trio_pdproxy.config import Settings
from trio_pdproxy.core.errors import Fault, ProxyError

log = logging.getLogger("trio_pdproxy.web")

PATIENCE = 2.0
"""Seconds for a sibling's answer."""

Answer = Callable[[], bytes]


class Siblings:
    """The workers of one proxy, this one included.

    `answers`: what may be asked, by name. `name`: its own in `folder`. Raises OSError where it cannot listen there.
    """

    def __init__(self, folder: Path, answers: dict[str, Answer], *, name: str) -> None:
        self.folder = folder
        self._answers = answers
        self._own = folder / f"{name}.sock"
        self._own.unlink(missing_ok=True)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self._own))
        self._listening.listen(16)

    @property
    def count(self) -> int:
        """Workers that have been seen to start."""
        return len(list(self.folder.glob("*.sock")))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer the others until cancelled."""
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listening))
        try:
            task_status.started()
            await trio.serve_listeners(self._answer, [listener])
        finally:
            self._own.unlink(missing_ok=True)

    async def _answer(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(PATIENCE), suppress(trio.BrokenResourceError):
            async with stream:
                question = (await stream.receive_some(64)).decode("ascii", "replace").strip()
                if (answer := self._answers.get(question)) is not None:
                    await stream.send_all(answer())

    async def ask(self, question: str) -> list[bytes]:
        """The answers of all workers, this one's first. Raises `ProxyError` (503) where one is there and does not
        answer: the sum would be wrong."""
        answers = [self._answers[question]()]

        async def one(path: Path) -> None:
            answer = await _ask(path, question)
            if answer is not None:
                answers.append(answer)

        others = [path for path in self.folder.glob("*.sock") if path != self._own]
        try:
            with trio.fail_after(PATIENCE):
                async with trio.open_nursery() as nursery:
                    for path in others:
                        nursery.start_soon(one, path)
        except trio.TooSlowError:
            raise ProxyError(
                "another worker of this proxy does not answer", status=503, fault=Fault.PROXY, code="no_sibling"
            ) from None
        return answers


async def _ask(path: Path, question: str) -> bytes | None:
    """One worker's answer; None if it is gone."""
    asking = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = None
    try:
        await asking.connect(str(path))
        stream = trio.SocketStream(asking)
        await stream.send_all(f"{question}\n".encode())
        pieces = []
        while piece := await stream.receive_some(65536):
            pieces.append(piece)
    except (OSError, trio.BrokenResourceError):
        with suppress(OSError):
            path.unlink()  # killed: nobody else takes its socket away
        return None
    finally:
        if stream is not None:
            await trio.aclose_forcefully(stream)  # noqa: ASYNC102  it waits for nothing
        else:
            asking.close()
    return b"".join(pieces) or None


def find_siblings(settings: Settings, answers: dict[str, Answer]) -> Siblings | None:
    """This process's siblings, where it is a worker that another process has started; else None."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return None
    same = blake2b(msgspec.json.encode(settings.redacted()), digest_size=8).hexdigest()
    base = Path(tempfile.gettempdir()) / f"pdproxy-{os.getuid()}"
    try:
        # Containers may share the temporary directory, and each has a process 1.
        namespace = os.stat("/proc/self/ns/pid").st_ino
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(f"{base} is not this user's alone")
        _sweep(base, namespace)
        folder = base / f"{namespace}-{parent.pid}-{same}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return Siblings(folder, answers, name=str(os.getpid()))
    except OSError as error:
        log.warning("metrics will be those of one worker at a time: %s", error)
        return None


def _sweep(base: Path, namespace: int) -> None:
    """Remove what servers that are gone have left behind: their workers end without a chance to."""
    for folder in base.glob(f"{namespace}-*"):
        pid = folder.name.split("-")[1]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
