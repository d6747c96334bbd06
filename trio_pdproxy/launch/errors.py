"""What can go wrong before an engine serves, or afterwards: a class per thing a caller can do about it."""

from __future__ import annotations

from pathlib import Path


class LaunchError(Exception):
    """Base of what `trio_pdproxy.launch` raises on purpose. Its text is a sentence a user can act on."""


class SetupError(LaunchError):
    """The engine environment or the test model could not be made."""


class PortInUseError(LaunchError):
    """A port an engine needs is held by somebody else. Nothing was started and nobody was touched."""


class MissingProgramError(LaunchError):
    """The program of an engine's command is not there, or cannot be executed. Nothing was started."""


class EngineError(LaunchError):
    """An engine process ended although nobody asked it to.

    `returncode` is as in `subprocess`: negative is the signal that ended it, None means it was still
    alive (a start that missed its deadline). `tail` holds the last lines of its log.
    """

    def __init__(
        self,
        what: str,
        *,
        name: str,
        returncode: int | None,
        cause: str | None,
        log_path: Path,
        tail: list[str],
    ) -> None:
        self.what = what
        """The first line: which engine, what happened."""
        self.name = name
        self.returncode = returncode
        self.cause = cause
        self.log_path = log_path
        self.tail = tail
        lines = [what]
        if cause is not None:
            lines.append(f"Likely cause: {cause}")
        lines.append(f"Log: {log_path}")
        lines += [f"  | {line}" for line in tail]
        super().__init__("\n".join(lines))


class EngineStartError(EngineError):
    """An engine ended, or missed its deadline, before it was ready."""


class EngineExitedError(EngineError):
    """An engine that had been ready ended."""
