"""One client request through one pair of engines after another: the legs, the debt, and what the client gets."""

from trio_pdproxy.exchange.run import run_exchange
from trio_pdproxy.exchange.sink import Sink
from trio_pdproxy.exchange.warmup import keep_warm

__all__ = ["Sink", "keep_warm", "run_exchange"]
