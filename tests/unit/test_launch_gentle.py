"""What engines are told to do while they wait, in an interpreter of its own, as in theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trio_pdproxy.launch import gentle

NIXL = """
class nixlAgentConfig:
    useProgThread = pthrDelay = None
"""
# As NIXL's Python API does it.
ENGINE = """
import os, time
from nixl_cu12 import _bindings as nixlBind

config = nixlBind.nixlAgentConfig()
config.useProgThread = True
config.pthrDelay = 0
before = os.sched_getaffinity(0)
os.sched_setaffinity(0, [max(before)])
assert os.sched_getaffinity(0) == before
begun = time.perf_counter()
os.sched_yield()
print(config.pthrDelay, config.useProgThread, isinstance(config, nixlBind.nixlAgentConfig))
print(time.perf_counter() - begun >= 0.0002)
"""


def run(folder: Path, program: str) -> list[str]:
    """What `program` prints where `folder` comes first on its path, as an engine's gentle folder does."""
    (folder / "sitecustomize.py").write_text(Path(gentle.__file__).read_text())
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_an_engine_waits_without_keeping_its_core(tmp_path: Path) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").touch()
    (tmp_path / "nixl_cu12" / "_bindings.py").write_text(NIXL)
    assert run(tmp_path, ENGINE) == [f"{gentle.PATIENCE} True True", "True"]


def test_a_library_that_is_not_there_is_missed_as_ever(tmp_path: Path) -> None:
    program = "try:\n    import nixl_cu12._bindings\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert run(tmp_path, program) == ["No module named 'nixl_cu12'"]


def test_under_its_own_name_it_changes_nothing() -> None:
    assert os.sched_yield is not gentle.yield_the_core
    assert os.sched_setaffinity is not gentle.stay
    assert not any(isinstance(finder, gentle.PatientNixl) for finder in sys.meta_path)
