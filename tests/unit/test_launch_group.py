"""Process groups: everything of a command ends with its block, and with its launcher however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import trio

from trio_pdproxy.launch.group import ProcessGroup, open_group
from trio_pdproxy.launch.guard import group_members

ENV = dict(os.environ)

# A leader and a grandchild in the same group; the leader says so once both are there.
FAMILY = """
import os, signal, sys, time
{first}
if os.fork() == 0:
    {grandchild}
    print("grandchild", flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep({leader})
"""


def family(*, first: str = "", grandchild: str = "pass", leader: str = "60") -> list[str]:
    return [sys.executable, "-S", "-c", FAMILY.format(first=first, grandchild=grandchild, leader=leader)]


async def until(wanted: Callable[[], bool]) -> None:
    with trio.fail_after(30):  # a start on a machine that does other things, too
        while True:
            if wanted():
                return
            await trio.sleep(0.01)


def says(log: Path, word: str) -> bool:
    return log.exists() and word in log.read_text()


async def test_the_exit_code_is_the_commands_own(tmp_path: Path) -> None:
    async with open_group(
        ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], env=ENV, log_path=tmp_path / "log"
    ) as group:
        await group.wait_exit()
        assert await group.finish() == 3
        assert await group.finish() == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_command_that_dies_by_a_signal_is_reported_so(tmp_path: Path, number: int) -> None:
    async with open_group(["/bin/sh", "-c", f"kill -{int(number)} $$"], env=ENV, log_path=tmp_path / "log") as group:
        await group.wait_exit()
        assert await group.finish() == -number


async def test_a_command_that_cannot_be_run_says_so_in_its_log(tmp_path: Path) -> None:
    async with open_group(["/no/such/program"], env=ENV, log_path=tmp_path / "log") as group:
        await group.wait_exit()
        assert await group.finish() == 127
    assert (tmp_path / "log").read_text() == "cannot run /no/such/program: No such file or directory\n"


async def test_niceness_is_handed_down(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_group(["nice"], env=ENV, log_path=log, nice=3) as group:
        await group.wait_exit()
        assert await group.finish() == 0
    assert int(log.read_text()) == min(19, os.nice(0) + 3)


async def test_leaving_the_block_ends_grandchildren_too(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_group(family(), env=ENV, log_path=log) as group:
        await until(lambda: says(log, "grandchild"))
        assert len(group_members(group.pid)) == 3
    assert group_members(group.pid) == []


async def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    async with open_group(family(first=stubborn), env=ENV, log_path=log, grace=0.2) as group:
        await until(lambda: says(log, "grandchild"))
        begun = trio.current_time()
    assert 0.2 <= trio.current_time() - begun < 5
    assert group_members(group.pid) == []


async def test_a_grandchild_that_outlives_its_leader_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_group(family(leader="0.3"), env=ENV, log_path=log) as group:
        await group.wait_exit()
        assert await group.finish() == 0
        assert group_members(group.pid) == []
    assert says(log, "grandchild")


HEADLESS = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
# exit(2) ends this thread alone, the main one: /proc then shows a zombie that still runs.
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


async def test_a_zombie_whose_threads_still_run_counts_as_alive(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def main_threads_are_over() -> bool:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in living()]
        return "Z" in stats

    def living() -> list[int]:
        return group_members(group.pid)

    async with open_group([sys.executable, "-c", HEADLESS], env=ENV, log_path=log, grace=0.1) as group:
        await until(lambda: says(log, "up"))
        await until(main_threads_are_over)
        assert len(living()) == 2
    assert living() == []


async def test_sigterm_lets_the_command_end_in_its_own_way(tmp_path: Path) -> None:
    log = tmp_path / "log"
    polite = "trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.02; done"
    async with open_group(["/bin/sh", "-c", polite], env=ENV, log_path=log) as group:
        await until(lambda: says(log, "up"))
        assert await group.stop() == 7
    assert "bye" in log.read_text()


async def test_several_tasks_can_wait_for_the_same_exit(tmp_path: Path) -> None:
    async with open_group(["/bin/sleep", "0.1"], env=ENV, log_path=tmp_path / "log") as group:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(group.wait_exit)
        await group.finish()
        await group.wait_exit()


async def test_cancelling_at_any_moment_leaves_no_process(tmp_path: Path) -> None:
    seen: list[ProcessGroup] = []
    for delay in (0.0, 0.001, 0.01, 0.03, 0.06):
        with trio.move_on_after(delay):
            async with open_group(family(), env=ENV, log_path=tmp_path / "log") as group:
                seen.append(group)
                await trio.sleep_forever()
    assert seen
    assert all(group_members(group.pid) == [] for group in seen)


# Leaves a segment and a semaphore in /dev/shm as vLLM's queues do, and one that somebody else uses as well.
SHARES = """
import multiprocessing, os, sys, time
from multiprocessing import shared_memory
mine = shared_memory.SharedMemory(create=True, size=4096)
theirs = shared_memory.SharedMemory(name=sys.argv[1])
lock = multiprocessing.get_context("spawn").Lock()
print(mine.name, lock._semlock.name.strip("/"), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("launcher_dies", [False, True])
async def test_killed_processes_leave_nothing_in_shared_memory(tmp_path: Path, launcher_dies: bool) -> None:
    log = tmp_path / "log"
    theirs = shared_memory.SharedMemory(create=True, size=4096)
    try:
        command = [sys.executable, "-c", SHARES, theirs.name]
        if launcher_dies:
            script = LAUNCHER.replace('[sys.executable, "-S", "-c", sys.argv[2]]', "sys.argv[2:]")
            launcher = await trio.lowlevel.open_process([sys.executable, "-c", script, str(log), *command])
            try:
                await until(lambda: says(log, "\n"))
            finally:
                launcher.kill()
                with trio.move_on_after(10, shield=True):
                    await launcher.wait()
        else:
            async with open_group(command, env=ENV, log_path=log) as group:
                await until(lambda: says(log, "\n"))
                group.kill()
        name, semaphore = log.read_text().split()[:2]
        await until(lambda: not Path("/dev/shm", name).exists() and not Path("/dev/shm", f"sem.{semaphore}").exists())
        assert Path("/dev/shm", theirs.name).exists()
    finally:
        theirs.close()
        theirs.unlink()


LAUNCHER = """
import os, pathlib, sys, trio
from trio_pdproxy.launch.group import open_group
async def main():
    argv = [sys.executable, "-S", "-c", sys.argv[2]]
    async with open_group(argv, env=dict(os.environ), log_path=pathlib.Path(sys.argv[1])) as group:
        print(group.pid, flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


async def test_a_launcher_that_is_sigkilled_takes_the_whole_group_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stubborn = family(first="signal.signal(signal.SIGTERM, signal.SIG_IGN)")[-1]
    command = [sys.executable, "-c", LAUNCHER, str(log), stubborn]
    launcher = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    try:
        with trio.fail_after(20):
            pid = int(await launcher.stdout.receive_some())
        await until(lambda: says(log, "grandchild"))
        assert len(group_members(pid)) == 3
    finally:
        with trio.move_on_after(10, shield=True):
            launcher.kill()
            await launcher.wait()
            await launcher.stdout.aclose()
    await until(lambda: group_members(pid) == [])


def test_the_guard_refuses_to_run_inside_somebody_elses_group() -> None:
    from trio_pdproxy.launch.group import GUARD

    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARD), "0", "0", "-", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "must lead its process group" in done.stderr
