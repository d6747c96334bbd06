"""Which engines there are, and which of them may be given one request.

The pairs are worked out when something changes, not for each request.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Mapping, Sequence

import trio

from trio_pdproxy.config import EngineSpec, Role, Settings
from trio_pdproxy.core.routing import compatible
from trio_pdproxy.engines.connections import Dial
from trio_pdproxy.engines.engine import Engine

_Warmth = tuple[str, str | None, str, str | None]


class Roster:
    """The engines by role, in the order they were named. `changed` is called by an engine that has changed."""

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[], None],
        *,
        ssl_context: ssl.SSLContext | None = None,
        dial: Dial | None = None,
    ) -> None:
        self._settings = settings
        self._changed = changed
        self._ssl_context = ssl_context
        self._dial = dial
        self.prefill: list[Engine] = []
        self.decode: list[Engine] = []
        self.pairs: Mapping[Engine, Sequence[Engine]] = {}
        """Of each usable prefill engine, the usable decode engines it may be paired with."""
        self.receivers: Sequence[Engine] = ()
        """The usable decode engines."""
        self.cold: list[tuple[Engine, Engine]] = []
        """Pairs that could serve once they have had a transfer."""
        self.news = trio.Event()
        """Set when `pairs` and `cold` are worked out anew; another one stands here then."""
        self._warm: set[_Warmth] = set()
        self._failed: set[_Warmth] = set()
        for spec in settings.prefill:
            self.add("prefill", spec)
        for spec in settings.decode:
            self.add("decode", spec)

    # -- the set ---------------------------------------------------------------------------------

    def add(self, role: Role, spec: EngineSpec) -> list[Engine]:
        """Raises `ValueError` where its name or its address is taken."""
        engines = self._of_role(role)
        if any(engine.spec.name == spec.name for engine in (*self.prefill, *self.decode)):
            raise ValueError(f"there is an engine {spec.name} already")
        if any(engine.spec.url == spec.url for engine in engines):
            raise ValueError(f"{spec.url} is a {role} engine already")
        ranks = range(spec.dp_size) if spec.dp_size and spec.dp_size > 1 else (None,)
        added = [
            Engine(role, spec, self._settings, rank=rank, ssl_context=self._ssl_context, dial=self._dial)
            for rank in ranks
        ]
        for engine in added:
            engine.on_change = self._changed
        engines.extend(added)
        return added

    def named(self, name: str) -> list[Engine]:
        """The engine of that name, all its ranks. Raises `KeyError`."""
        found = [engine for engine in (*self.prefill, *self.decode) if name in (engine.spec.name, engine.name)]
        if not found:
            raise KeyError(name)
        return found

    def discard(self, engine: Engine) -> None:
        engines = self._of_role(engine.role)
        if engine in engines:
            engines.remove(engine)
        for known in (self._warm, self._failed):
            known.difference_update([warmth for warmth in known if engine.name in (warmth[0], warmth[2])])
        self.refresh()

    def _of_role(self, role: Role) -> list[Engine]:
        return self.prefill if role == "prefill" else self.decode

    # -- pairs -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Work out what can serve. Where nothing is left, those that were ejected are the last resort: while an engine
        lives, a try is better than a refusal."""
        senders = [engine for engine in self.prefill if engine.usable] or [e for e in self.prefill if e.known]
        self.receivers = [engine for engine in self.decode if engine.usable] or [e for e in self.decode if e.known]
        pairs: dict[Engine, Sequence[Engine]] = {}
        self.cold = []
        for p in senders:
            partners = []
            for d in self.receivers:
                if not compatible(p, d) or not _of_one_revision(p, d):
                    continue
                if self._settings.warm_up and _warmth(p, d) not in self._warm:
                    self.cold.append((p, d))
                else:
                    partners.append(d)
            if partners:
                pairs[p] = partners
        self.pairs = pairs
        self.news.set()
        self.news = trio.Event()

    def warmed(self, prefill: Engine, decode: Engine) -> None:
        """This pair has had a transfer, as who they are now."""
        self._warm.add(_warmth(prefill, decode))
        self._changed()

    def failed_to_warm(self, prefill: Engine, decode: Engine) -> None:
        """A transfer was tried between the two, as who they are now, and did not come about."""
        self._failed.add(_warmth(prefill, decode))
        self._changed()

    def learning(self, pair: bool, avoid: Collection[str] = ()) -> bool:
        """Whether there are engines (asked for a pair: pairs) of which it is just being found out if they can serve;
        those to `avoid` left out."""
        wanted = [*self.prefill, *self.decode] if pair else self.decode
        if any(engine.being_asked for engine in wanted if engine.name not in avoid):
            return True
        cold = (warm for warm in self.cold if pair and not any(engine.name in avoid for engine in warm))
        return any(_warmth(*one) not in self._failed for one in cold)

    # -- in words --------------------------------------------------------------------------------

    def missing(self, pair: bool) -> list[str]:
        """Why there is no pair (or, not `pair`, no decode engine), one sentence each."""
        reasons = []
        for role, engines in (("prefill", self.prefill), ("decode", self.decode)):
            if (pair or role == "decode") and not any(engine.usable for engine in engines):
                each = "; ".join(f"{engine.name}: {engine.why}" for engine in engines) or "there is none"
                reasons.append(f"no usable {role} engine ({each})")
        if not reasons:
            reasons.append(self._not_warm() if self.cold else self._incompatible())
        return reasons

    def _not_warm(self) -> str:
        names = ", ".join(f"{p.name} and {d.name}" for p, d in self.cold[:4])
        return f"no pair has had its first transfer yet (under way or failing, see the log): {names}"

    def _incompatible(self) -> str:
        p = next(engine for engine in self.prefill if engine.usable)
        d = next(engine for engine in self.decode if engine.usable)
        if not _of_one_revision(p, d):
            return (
                f"no prefill engine has a decode engine of its revision ({p.name}: {p.spec.revision}, "
                f"{d.name}: {d.spec.revision})"
            )
        return (
            f"prefill engine {p.name} ({p.about.words()}) and decode engine {d.name} ({d.about.words()}) cannot pair: "
            "their NIXL compatibility hashes differ. Start both with the same vLLM version, the same --model text, the "
            "same KV cache dtype, layout and attention backend, and both with the same connector (NixlPushConnector "
            "or NixlPullConnector)"
        )


def _of_one_revision(prefill: Engine, decode: Engine) -> bool:
    ours, theirs = prefill.spec.revision, decode.spec.revision
    return ours is None or theirs is None or ours == theirs


def _warmth(prefill: Engine, decode: Engine) -> _Warmth:
    """Who has met whom: an engine that comes back as another has met nobody."""
    return (
        prefill.name,
        prefill.coordinates.engine_id if prefill.coordinates else None,
        decode.name,
        decode.about.meta.engine_id if decode.about.meta else None,
    )
