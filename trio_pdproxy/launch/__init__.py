"""Engines as external processes: prepared, started, watched, restarted, and never left behind.

    script = load_script(Path("engines.yaml"))
    async with open_engines(script) as engines:
        ...

`open_engines` starts what a launch script says; `open_vllm` real vLLM engines on the CPU with a test model;
`EngineProcess` runs any engine command once. Nothing here prints or knows the proxy's server: commands compose the two
(`keep_told` tells a proxy's pool what happens to the engines).
"""

from .environment import EngineEnvironment, ensure_environment, find_environment
from .errors import (
    EngineError,
    EngineExitedError,
    EngineStartError,
    LaunchError,
    MissingProgramError,
    PortInUseError,
    SetupError,
)
from .model import ensure_model
from .plan import EngineCommand, LaunchPlan, make_plan
from .process import EngineProcess
from .progress import Progress, Step
from .running import EngineSet, open_engines, open_vllm, prepare, run_plan
from .script import Restart, RoleEngines, Script, load_script
from .supervise import EngineEvent, State, SupervisedEngine
from .told import keep_told, restart_stranded

__all__ = [
    "EngineCommand",
    "EngineEnvironment",
    "EngineError",
    "EngineEvent",
    "EngineExitedError",
    "EngineProcess",
    "EngineSet",
    "EngineStartError",
    "LaunchError",
    "LaunchPlan",
    "MissingProgramError",
    "PortInUseError",
    "Progress",
    "Restart",
    "RoleEngines",
    "Script",
    "SetupError",
    "State",
    "Step",
    "SupervisedEngine",
    "ensure_environment",
    "ensure_model",
    "find_environment",
    "keep_told",
    "load_script",
    "make_plan",
    "open_engines",
    "open_vllm",
    "prepare",
    "restart_stranded",
    "run_plan",
]
