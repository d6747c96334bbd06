"""What is wrong with a set of engines, in words: looked at from outside, as a proxy would meet them.

    facts = await gather(settings)
    for finding in findings(facts, settings): ...

`gather` asks (and holds one KV block of each prefill engine for its lease); `findings` is pure.
"""

from trio_pdproxy.check.facts import EngineFacts, Load, gather
from trio_pdproxy.check.findings import Finding, Level, findings
from trio_pdproxy.check.script import script_findings

__all__ = ["EngineFacts", "Finding", "Level", "Load", "findings", "gather", "script_findings"]
