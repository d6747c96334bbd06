"""Run one command so that it cannot outlive its launcher. Run as a script; the launcher imports its functions only.

    python -I -S guard.py FD NICE COMMAND [ARG...]

FD is the read end of a pipe whose only write end the launcher holds. When that end closes, which the
kernel sees to however the launcher ends (SIGKILL too), the guard kills its whole process group. The
guard must lead that group; it ends as the command ended: with its exit code, or by its signal.

Why not PR_SET_PDEATHSIG: it follows the *thread* that forked, and trio starts processes in a worker
thread that retires after ten idle seconds: the engine would be killed then. It would not reach
grandchildren (vLLM's EngineCore and workers) either.

What processes that are killed leave in /dev/shm is removed, here and by the launcher: vLLM's message queues and
semaphores (psm_*, sem.mp-*) are files there until somebody unlinks them, and its own tracker dies with the group.

Only the standard library's C modules and os are imported: one guard stays resident per engine.
"""

import os
import resource
import select
import signal
import sys
from typing import NoReturn

SHARED_MEMORY = b"/dev/shm/"

# The whole group gets these; the command decides when to end, and the guard ends after it.
PASSED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def _ignore(_signal: int, _frame: object) -> None:
    """Outlive a signal that is meant for the command. A handler, not SIG_IGN: exec resets handlers only."""


def _exec(argv: list[str], watch: int) -> NoReturn:
    os.close(watch)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _end_as(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped core if anybody wanted one
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def group_members(pgid: int) -> list[int]:
    """The living processes of a group. Zombies hold nothing and are not counted: a container without an
    init process never reaps them. But one whose other threads are still ending is alive: its ports are.
    """
    members = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # pid (command, which may hold anything) state ppid pgrp ...
            state, _, group = _read(f"/proc/{entry}/stat").rpartition(b")")[2].split()[:3]
            dead = state in (b"Z", b"X") and len(os.listdir(f"/proc/{entry}/task")) <= 1
        except OSError:
            continue
        if int(group) == pgid and not dead:
            members.append(int(entry))
    return members


def shared_memory_of(pids: list[int]) -> set[int]:
    """The files in /dev/shm that these processes have mapped, by inode: of a named semaphore the mapping knows only
    the temporary name it was made under."""
    found = set()
    for pid in pids:
        try:
            lines = _read(f"/proc/{pid}/maps").splitlines()
        except OSError:  # gone meanwhile, or another user's
            continue
        for line in lines:
            # address permissions offset device inode path (which may hold spaces)
            columns = line.split(None, 5)
            if len(columns) == 6 and columns[5].startswith(SHARED_MEMORY):
                found.add(int(columns[4]))
    return found


def unlink_shared_memory(inodes: set[int], dying: list[int]) -> None:
    """Remove those of these files that are ours and that no process but the `dying` ones has mapped."""
    if not inodes:
        return
    others = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in dying]
    left = inodes - shared_memory_of(others)
    for entry in os.scandir(SHARED_MEMORY):
        try:
            if entry.inode() in left and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                os.unlink(entry.path)
        except OSError:  # its owner was quicker
            pass


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _end_group() -> None:
    """Kill the group, the guard with it; a child outside of it lives long enough to remove what they leave."""
    group = os.getpid()
    try:
        dying = group_members(group)
        left = shared_memory_of(dying)
        if left:
            child = os.fork()
            if child == 0:
                os.setsid()
                os.killpg(group, signal.SIGKILL)
                unlink_shared_memory(left, dying)
                os._exit(0)
            os.waitpid(child, 0)  # comes back only if the child failed
    finally:
        os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> NoReturn:
    watch, nice, command = int(argv[0]), int(argv[1]), argv[2:]
    if os.getpgrp() != os.getpid():
        sys.exit("guard.py must lead its process group (start_new_session)")
    for number in PASSED_BY:
        signal.signal(number, _ignore)
    child = os.fork()
    if child == 0:  # the guard itself yields to nobody: engines that spin must not keep it from ending them
        os.nice(nice)
        _exec(command, watch)
    exited = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watch, select.POLLIN | select.POLLHUP)
    poll.register(exited, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if watch in ready:
        _end_group()
    _end_as(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
