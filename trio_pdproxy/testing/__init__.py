"""For tests of a deployment, a policy or the proxy itself: everything between a client and simulated engines."""

from trio_pdproxy.testing.client import requested
from trio_pdproxy.testing.rig import Rig, Streamed, open_rig

__all__ = ["Rig", "Streamed", "open_rig", "requested"]
