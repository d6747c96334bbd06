"""Simulated prefill and decode engines: real HTTP, a real side channel, and failures on demand.

They keep to what a proxy can see of vLLM 0.32 with the NIXL push connector (or the pull one), down to error
bodies and to the blocks that a decode engine keeps for ever when its push does not come.
"""

from trio_pdproxy.sim.cluster import Cluster, build_cluster, open_cluster
from trio_pdproxy.sim.engine import SimEngine
from trio_pdproxy.sim.fabric import Fabric, Transport
from trio_pdproxy.sim.faults import Fault, FaultScript, SeenRequest
from trio_pdproxy.sim.http_transport import HttpTransport
from trio_pdproxy.sim.model import expected_chat, expected_text
from trio_pdproxy.sim.settings import Mode, SimSettings

__all__ = [
    "Cluster",
    "Fabric",
    "Fault",
    "FaultScript",
    "HttpTransport",
    "Mode",
    "SeenRequest",
    "SimEngine",
    "SimSettings",
    "Transport",
    "build_cluster",
    "expected_chat",
    "expected_text",
    "open_cluster",
]
