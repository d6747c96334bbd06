"""From a client's request to the bodies of its legs, and from an engine's answer to what the client may see of it.

Pure: ids and coordinates are handed in. What the APIs differ in is one table (`apis.py`).
"""

from trio_pdproxy.core.plan.answer import (
    NOTHING_SAID,
    PrefillSaid,
    Told,
    read_prefill_answer,
    shown_answer,
    shown_block,
    tokens_in,
    told_in,
    transfer_params_in,
)
from trio_pdproxy.core.plan.apis import ALONE, APIS, PAIRED, Api, Usage
from trio_pdproxy.core.plan.members import DEPTH_LIMIT
from trio_pdproxy.core.plan.request import FORWARDED_HEADERS, Coordinates, Kind, Plan, read_plan

__all__ = [
    "ALONE",
    "APIS",
    "DEPTH_LIMIT",
    "FORWARDED_HEADERS",
    "NOTHING_SAID",
    "PAIRED",
    "Api",
    "Coordinates",
    "Kind",
    "Plan",
    "PrefillSaid",
    "Told",
    "Usage",
    "read_plan",
    "read_prefill_answer",
    "shown_answer",
    "shown_block",
    "tokens_in",
    "told_in",
    "transfer_params_in",
]
