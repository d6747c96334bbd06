"""Run one command so that it cannot outlive its launcher. Run as a script, never imported by the launcher.

    python -I -S guard.py FD NICE COMMAND [ARG...]

FD is the read end of a pipe whose only write end the launcher holds. When that end closes, which the
kernel sees to however the launcher ends (SIGKILL too), the guard kills its whole process group. The
guard must lead that group; it ends as the command ended: with its exit code, or by its signal.

Why not PR_SET_PDEATHSIG: it follows the *thread* that forked, and trio starts processes in a worker
thread that retires after ten idle seconds: the engine would be killed then. It would not reach
grandchildren (vLLM's EngineCore and workers) either.

Only the standard library's C modules and os are imported: one guard stays resident per engine.
"""

import os
import resource
import select
import signal
import sys
from typing import NoReturn

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


def main(argv: list[str]) -> NoReturn:
    watch, nice, command = int(argv[0]), int(argv[1]), argv[2:]
    if os.getpgrp() != os.getpid():
        sys.exit("guard.py must lead its process group (start_new_session)")
    for number in PASSED_BY:
        signal.signal(number, _ignore)
    os.nice(nice)
    child = os.fork()
    if child == 0:
        _exec(command, watch)
    exited = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watch, select.POLLIN | select.POLLHUP)
    poll.register(exited, select.POLLIN)
    ready = {fd for fd, _ in poll.poll()}
    if watch in ready:
        os.killpg(0, signal.SIGKILL)
    _end_as(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
