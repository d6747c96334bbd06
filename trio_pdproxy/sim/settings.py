"""What a simulated engine can be told. Times are in seconds, sizes in tokens or blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["push", "pull"]


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The same settings belong to both engines of a pair, as `--model` and the version do on real ones.

    Every time is measured on trio's clock, so a test with a MockClock waits for nothing.
    """

    model: str = "sim"
    version: str = "0.32.0"
    mode: Mode = "push"
    """Which of the NIXL connectors: P writes into D's blocks, or D reads P's once P has answered."""
    api_key: str | None = None
    """Guards `/v1/*` only; health, metrics and version answer without it."""
    block_size: int = 16
    num_blocks: int = 65536
    max_model_len: int = 4096
    max_num_seqs: int = 1024
    """Sequences that run at once; the others queue. On D nothing is registered while it queues."""
    max_n: int = 16384
    """Choices of one request, VLLM_MAX_N_SEQUENCES."""
    lease: float = 30.0
    """How long P keeps finished blocks for a D that has not registered yet."""
    default_max_tokens: int = 16
    prompt_tokens_details: bool = False
    """`--enable-prompt-tokens-details`: answers tell how many of a prompt's tokens were in the cache."""
    prefill_base: float = 0.002
    prefill_per_token: float = 0.0
    first_token: float = 0.0
    """From the arrival of the KV at D to D's first token."""
    itl: float = 0.0
    """Between tokens. 0: as fast as the client reads."""
    keep_alive: float = 5.0
    """An idle connection is closed after this; the real server's 5 s races with a client that reuses it."""
    handshake_timeout: float = 5.0
    """How long D's first contact with a P that does not answer takes to fail."""
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    dp_size: int = 1
    """Data-parallel ranks behind one HTTP port: each has its own engine id, side channel and `num_blocks` blocks."""
    remember: int = 100_000
    """How many of the last requests `SimEngine.requests` is sure to hold; at times up to twice as many."""
