"""Manners for engines on machines with few cores. Copied to the front of their PYTHONPATH as `sitecustomize`, which
Python loads at start; imported under any other name it does nothing.

Three habits suit an engine whose machine is its own alone. Where it is not they starve everything, the engine's own
API server included: connections were not made within 5 s, requests waited for a minute, kernel workers for 104 s.
Measured on vLLM 0.32 with NIXL 1.5.1 on two cores, without and with this: a pair at rest takes 197 % or 6 % of a core,
a prompt's first token comes after 154 or 58 ms.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from typing import Any

YIELD_SECONDS = 0.0002
PATIENCE = 1000
"""Microseconds."""


def yield_the_core() -> None:
    """For os.sched_yield, which vLLM's workers call for a second after each step, and without end while a decode
    engine waits for a push (vllm/distributed/device_communicators/shm_broadcast.py)."""
    time.sleep(YIELD_SECONDS)


def stay(_pid: int, _cpus: object) -> None:
    """For os.sched_setaffinity: the NIXL connector moves the whole worker of a CPU engine to the last core of its NUMA
    node, where the workers of all engines come together (nixl/base_worker.py: rsv_cores_for_kv)."""


class PatientNixl(MetaPathFinder, Loader):
    """NIXL's progress thread looks for news without a pause, a whole core of it: its Python API sets `pthrDelay`, for
    how long it may wait for some, to 0 (nixl/_api.py: nixl_agent). News wakes it all the same."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not (name.startswith("nixl") and name.endswith("._bindings")):
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)

        class PatientConfig(module.nixlAgentConfig):  # type: ignore[misc]
            def __setattr__(self, name: str, value: object) -> None:
                super().__setattr__(name, PATIENCE if name == "pthrDelay" else value)

        module.nixlAgentConfig = PatientConfig


if __name__ == "sitecustomize":
    os.sched_yield = yield_the_core
    os.sched_setaffinity = stay
    sys.meta_path.insert(0, PatientNixl())
