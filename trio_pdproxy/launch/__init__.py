"""Engines as external processes: prepared, started, watched, and never left behind.

    async with open_vllm(prefill=1, decode=1) as engines:
        ...

`open_vllm` makes what is missing and runs real vLLM engines on the CPU; `EngineProcess` supervises any
engine command. Nothing here prints or knows the proxy: commands compose the two.
"""

from .environment import EngineEnvironment, ensure_environment, find_environment
from .errors import (
    EngineError,
    EngineExitedError,
    EngineStartError,
    LaunchError,
    PortInUseError,
    SetupError,
)
from .model import ensure_model
from .pair import RunningEngine, RunningSet, open_vllm
from .process import EngineProcess
from .progress import Progress, Step
from .vllm import VllmEngine, vllm_argv, vllm_env

__all__ = [
    "EngineEnvironment",
    "EngineError",
    "EngineExitedError",
    "EngineProcess",
    "EngineStartError",
    "LaunchError",
    "PortInUseError",
    "Progress",
    "RunningEngine",
    "RunningSet",
    "SetupError",
    "Step",
    "VllmEngine",
    "ensure_environment",
    "ensure_model",
    "find_environment",
    "open_vllm",
    "vllm_argv",
    "vllm_env",
]
