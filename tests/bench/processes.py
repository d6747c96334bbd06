"""Starting the processes of a benchmark on their own core, and what they cost: CPU, memory, descriptors (Linux).

CPU time comes from each process's own CPU clock: the sum that /proc/PID/task/*/schedstat shows for each thread, in
nanoseconds, with the threads that have ended. /proc/PID/stat counts in hundredths of a second: too coarse here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Cores:
    """Which cores the proxy under test runs on, and which all else (load generator, engines, idle proxies)."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.all = set(cores)
        self.proxy = {cores[-1]}
        self.load = set(cores[:-1]) or self.all
        self.apart = len(cores) > 1


class Started:
    """A process with all that it starts, in a group of its own; its output goes to `log`."""

    def __init__(
        self, argv: Sequence[str], *, cores: set[int], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        before = os.sched_getaffinity(0)
        # Some size their thread pools by the cores they may use, at their start: it must be so from the first instant.
        os.sched_setaffinity(0, cores)
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(env) if env is not None else None,
                    cwd=ROOT,
                    start_new_session=True,
                )
        finally:
            os.sched_setaffinity(0, before)

    @property
    def pids(self) -> list[int]:
        """It and all that it has started, as far as they live."""
        children: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and (parent := _parent(int(entry))) is not None:
                children.setdefault(parent, []).append(int(entry))
        found = [self.process.pid]
        for pid in found:
            found.extend(children.get(pid, ()))
        return found

    def memory(self) -> int:
        """Bytes resident, shared pages divided among those who share them."""
        return sum(_pss(pid) for pid in self.pids)

    def last_words(self) -> str:
        """The end of what it wrote."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-8:])

    def stop(self, grace: float = 2.0) -> None:
        """End the whole group: asked, then told. Nothing that matters is in it any more."""
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 60.0)):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)


def spent(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """CPU seconds between two readings."""
    return sum(max(0.0, seconds - before.get(pid, 0.0)) for pid, seconds in after.items())


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """This process on `cores` for a block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """So far, of each of `pids` that lives."""
    seconds = {}
    for pid in pids:
        with suppress(OSError):  # it has just ended
            seconds[pid] = time.clock_gettime(~pid << 3 | 2)  # what clock_getcpuclockid(3) computes
    return seconds


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


def _pss(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
