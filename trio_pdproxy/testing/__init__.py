"""For tests of a deployment, a policy or the proxy itself: everything between a client and simulated engines.

`open_rig` has it on real sockets and the real clock; `open_memory_rig` in memory and on virtual time, where one
scenario can be run on many schedules (`one_outcome`) and cancelled at every step it takes (`sweep`).
"""

from trio_pdproxy.testing.client import requested
from trio_pdproxy.testing.cuts import MemorySink, client_closes, scope_cancelled, server_cancels
from trio_pdproxy.testing.memory import MemoryRig, Visit, open_memory_rig
from trio_pdproxy.testing.network import MemoryStream, Network, memory_pair
from trio_pdproxy.testing.rig import Rig, Streamed, open_rig
from trio_pdproxy.testing.schedules import Outcome, one_outcome, outcome_of, run_seeded
from trio_pdproxy.testing.sweep import Cut, StepTrap, Swept, When, sweep
from trio_pdproxy.testing.tasks import Tree, grown, task_tree
from trio_pdproxy.testing.waiting import until

__all__ = [
    "Cut",
    "MemoryRig",
    "MemorySink",
    "MemoryStream",
    "Network",
    "Outcome",
    "Rig",
    "StepTrap",
    "Streamed",
    "Swept",
    "Tree",
    "Visit",
    "When",
    "client_closes",
    "grown",
    "memory_pair",
    "one_outcome",
    "open_memory_rig",
    "open_rig",
    "outcome_of",
    "requested",
    "run_seeded",
    "scope_cancelled",
    "server_cancels",
    "sweep",
    "task_tree",
    "until",
]
