"""A command in its own process group: nothing of it survives the block, nor the launcher.

`trio`'s own process running ends only the leader when it is cancelled; vLLM's EngineCore and its
workers, which hold the memory and the side-channel port, would live on as orphans. So the unit here is
the group: it gets SIGTERM, a grace period, then SIGKILL, and whoever SIGKILLs the launcher ends it too
(see `guard.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import trio

from .guard import group_members, shared_memory_of, unlink_shared_memory

GUARD = Path(__file__).with_name("guard.py")
# After SIGKILL: time for the kernel to take down gigabytes of mappings, so that ports are free again.
KILL_SECONDS = 5.0


class ProcessGroup:
    """A started command. Made by `open_group`."""

    def __init__(self, process: trio.Process, grace: float) -> None:
        self.pid = process.pid
        """The group's id too, and the guard's, not the command's own."""
        self.grace = grace
        """Seconds from SIGTERM to SIGKILL."""
        self._process = process
        # A pidfd of our own: the leader must stay unreaped while its group may still be signalled,
        # for only so the number cannot be anybody else's. (trio's returncode property reaps.)
        self._pidfd = os.pidfd_open(process.pid)
        self._returncode: int | None = None
        self._shared_memory: set[int] = set()

    async def wait_exit(self) -> None:
        """Return when the command has ended. Any number of tasks may wait."""
        if self._pidfd < 0:
            await trio.lowlevel.checkpoint()
            return
        mine = os.dup(self._pidfd)  # trio allows one waiter per descriptor
        try:
            await trio.lowlevel.wait_readable(mine)
        finally:
            os.close(mine)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group. Does nothing once the group was finished."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the whole group."""
        self.note_shared_memory()
        self.signal(signal.SIGKILL)

    def note_shared_memory(self) -> None:
        """Remember what the group has in /dev/shm, to remove what is left of it at the end.

        Called now and then: what only a process that has crashed by then had mapped cannot be found at the end.
        """
        if self._pidfd >= 0:
            self._shared_memory |= shared_memory_of(group_members(self.pid))

    async def stop(self) -> int:
        """SIGTERM, the grace period for the command to end, SIGKILL for what is left. Returns as `finish`.

        Bounded and shielded: it takes its time whoever is cancelled, but never more than grace + 5 s.
        """
        self.note_shared_memory()
        self.signal(signal.SIGTERM)
        with trio.move_on_after(self.grace, shield=True):
            await self.wait_exit()
        return await self.finish()

    async def finish(self) -> int:
        """Kill what is left of the group, reap the leader, return its exit code (negative: its signal)."""
        if self._returncode is None:
            self.kill()
            with trio.move_on_after(KILL_SECONDS, shield=True):
                await self.wait_exit()
                os.close(self._pidfd)
                self._pidfd = -1
                self._returncode = await self._process.wait()
                while True:  # nobody tells when the last one of a group is gone
                    if not group_members(self.pid):
                        break
                    await trio.sleep(0.02)
            unlink_shared_memory(self._shared_memory, [])
        # Not reaped only where even SIGKILL did not end it (a task stuck in the kernel).
        return self._returncode if self._returncode is not None else -signal.SIGKILL


@asynccontextmanager
async def open_group(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_path: Path,
    nice: int = 0,
    grace: float = 10.0,
) -> AsyncIterator[ProcessGroup]:
    """Run `argv` in a new session, its output appended to `log_path`; on leaving the block, stop it.

    `env` is the whole environment. A command that cannot be executed exits with 127 and says so in the log.
    The output goes to a file, not a pipe: nobody has to read for the engine to go on.
    """
    watch, alive = os.pipe()
    try:
        with _append(log_path) as log:
            process = await trio.lowlevel.open_process(
                [sys.executable, "-I", "-S", str(GUARD), str(watch), str(nice), *argv],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(watch,),
            )
        group = ProcessGroup(process, grace)
        try:
            yield group
        finally:
            try:
                with trio.move_on_after(grace + 2 * KILL_SECONDS, shield=True):
                    await group.stop()
            finally:
                group.kill()
    finally:
        # Closing this end is the last word: should anything above have gone wrong, the guard now kills.
        os.close(alive)
        os.close(watch)


def _append(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)
