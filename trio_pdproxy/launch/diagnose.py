"""From an exit code and the end of a log to the sentence that says what to do. Pure but for reading."""

from __future__ import annotations

import re
import signal
from pathlib import Path

TAIL_BYTES = 64 * 1024
SHOWN_LINES = 20

# The first rule that matches anywhere in the tail wins, so what causes the others stands first.
# `{0}` is the pattern's group.
RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), sentence)
    for pattern, sentence in (
        (r"address already in use(?:[^\n]*?(tcp://[\w.:\[\]]+|\('[^)]+\)|:\d+))?", "a port is in use: {0}"),
        (
            r"No module named '?([\w.]+)",
            "the Python module {0} is missing; run `trio-pdproxy engines install` again",
        ),
        (r"cannot run ([^\n]+)", "the program cannot be run: {0}"),
        (
            r"(?:Repo id must|is not a local folder and is not a valid|Invalid repository ID"
            r"|does not appear to have a file named config\.json|outgoing traffic has been disabled"
            r"|Can't load the configuration of|Cannot find any model weights)",
            "the model path is wrong, or the model is incomplete",
        ),
        (
            r"(?:MemoryError|Cannot allocate memory|out of memory|can't allocate memory|std::bad_alloc"
            r"|No available memory for the cache blocks|larger than the available KV cache memory)",
            "not enough memory (about 2.5 GB an engine, more for a real model)",
        ),
        (
            r"Free memory on device|is less than desired GPU memory utilization",
            "another process holds memory of this GPU; give each engine devices of its own or lower"
            " gpu-memory-utilization",
        ),
        (
            r"No CUDA GPUs are available|Failed to infer device type|NVIDIA driver",
            "no usable GPU is seen; check nvidia-smi and the script's `devices`, or use `preset: cpu`",
        ),
        (r"gated repo|401 Client Error|Access to model [^\n]+ is restricted", "the model is gated: set HF_TOKEN"),
        (r"No space left on device", "the disk is full"),
        (r"unrecognized arguments: ([^\n]+)", "this vLLM does not know the option {0}"),
        # vLLM's server then ends in order, with exit code 0.
        (r"EngineDeadError", "its EngineCore died; the first traceback in the log says of what"),
    )
)


# What a starting vLLM engine is at: the rule whose words come last in its log.
PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"non-default args", "reading the model's configuration"),
        (r"Initializing a V1 LLM engine", "starting its workers"),
        (r"Starting to load model", "loading the model"),
        (r"checkpoint shards:\s+(\d+%)", "loading weights, {0}"),
        (r"Loading weights took", "setting up the model"),
        (r"torch\.compile takes|Dynamo bytecode transform|Compiling a graph", "compiling"),
        (r"KV cache size|Available KV cache memory", "setting up the KV cache"),
        (r"Initializing NIXL w", "setting up NIXL"),
        (r"Registering KV_Caches", "registering KV memory with NIXL"),
        (r"Capturing CUDA graphs[^\n]*?(\d+%)", "capturing CUDA graphs, {0}"),
        (r"Graph capturing finished", "warming up"),
        (r"init engine \(profile", "starting its HTTP server"),
        (r"Application startup complete", "its first answer"),
    )
)


def doing(path: Path, *, since: int = 0) -> str:
    """What an engine that starts is at, from its log: a few words, "" where they are not known."""
    text = _end(path, since)
    last, words = -1, ""
    for pattern, sentence in PHASES:
        for found in pattern.finditer(text):
            if found.start() > last:
                last, words = found.start(), sentence.format(*found.groups())
    return words


def tail(path: Path, lines: int = SHOWN_LINES, *, since: int = 0) -> list[str]:
    """The last non-empty lines of a log, after byte `since`; none if there is no such file."""
    return [line for line in _end(path, since).splitlines() if line.strip()][-lines:]


def likely_cause(returncode: int | None, path: Path, *, since: int = 0) -> str | None:
    """One sentence, or None where nothing is known. Looks at the log first, at the exit code then.

    since -- where this run's output begins: an earlier run's failure in the same file explains nothing
    """
    text = _end(path, since)
    for pattern, sentence in RULES:
        if match := pattern.search(text):
            detail = next((group for group in match.groups() if group), None)
            return sentence.format(detail) if detail else sentence.removesuffix(": {0}")
    if returncode == -signal.SIGKILL:
        return "killed from outside; on a machine short of memory that is the kernel's out-of-memory killer"
    if returncode == -signal.SIGILL:
        return "this CPU lacks an instruction the wheel was built for"
    return None


def describe_exit(returncode: int | None) -> str:
    """'exit code 3', 'signal SIGKILL' or 'still running'."""
    if returncode is None:
        return "still running"
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def size(path: Path) -> int:
    """Bytes in a log so far; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _end(path: Path, since: int) -> str:
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(since, log.tell() - TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
