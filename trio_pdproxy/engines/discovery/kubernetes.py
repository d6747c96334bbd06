"""Engines in a Kubernetes cluster: pods by their labels, listed once and then watched.

List and watch as every Kubernetes client does: a list says what there is and at which version, a watch says what
has changed since. A watch ends now and then and is taken up where it ended; when the API has forgotten that version
(410) the list is made again. While the API does not answer, everything stays as it was.

A pod that is being deleted gives up its engine at once, before its container is told to stop: that is what draining is
for (and why the rendered pods wait a while before they stop).
"""

from __future__ import annotations

import logging
import random
from typing import TypeVar

import msgspec
import trio

from trio_pdproxy.config import ROLES, Role, Settings
from trio_pdproxy.engines.discovery.api import Api, ApiError, GoneError
from trio_pdproxy.engines.discovery.pods import BadPodError, Pod, engine_in
from trio_pdproxy.engines.discovery.source import Found, Tell

log = logging.getLogger("trio_pdproxy.discovery")

_T = TypeVar("_T")

WATCH_SECONDS = 60
"""Of one watch. An API server that has vanished without a word is noticed this late, so it is short."""

PAGE = 500
"""Pods in one answer to a list."""

SHORT, FIRST_PAUSE = 1.0, 0.2
"""Seconds: what ends sooner counts as a failure, and is tried again after a pause that doubles up to
discovery_interval."""


class _ListMetadata(msgspec.Struct, rename={"resource_version": "resourceVersion", "more": "continue"}):
    resource_version: str = ""
    more: str = ""


class _List(msgspec.Struct):
    metadata: _ListMetadata
    items: list[Pod] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: _ListMetadata


class _Error(msgspec.Struct):
    code: int = 0
    message: str = ""


class KubernetesSource:
    """The engines in the pods that the selectors of the settings select, in one namespace."""

    name = "kubernetes"

    def __init__(self, settings: Settings, api: Api | None = None) -> None:
        self._settings = settings
        self._api = api or Api(settings)
        self._troubles: dict[Role, str] = {}
        self._pods: dict[Role, dict[str, Pod]] = {}
        self._versions: dict[Role, str] = {}
        self._bad: dict[str, str] = {}

    @property
    def trouble(self) -> str | None:
        return "; ".join(dict.fromkeys(self._troubles.values())) or None

    async def watch(self, tell: Tell) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, "prefill", self._settings.prefill_selector, tell)
            nursery.start_soon(self._follow, "decode", self._settings.decode_selector, tell)

    async def _follow(self, role: Role, selector: str, tell: Tell) -> None:
        pause = 0.0
        while True:
            begun = trio.current_time()
            try:
                path = f"/api/v1/namespaces/{await self._api.namespace()}/pods"
                if role not in self._versions:
                    await self._list(role, path, selector)
                    tell(self._found())
                await self._watch(role, path, selector, tell)
            except GoneError as error:
                log.info("kubernetes: %s pods are listed again: %s", role, error)
                self._versions.pop(role, None)
            except ApiError as error:
                self._ill(role, str(error))
            if trio.current_time() - begun > SHORT:
                pause = 0.0  # it went well for a while
            else:
                pause = min(max(2 * pause, FIRST_PAUSE), self._settings.discovery_interval)
            # Not all replicas of the proxy at once.
            await trio.sleep(pause * random.uniform(0.5, 1.0))

    # -- the API ---------------------------------------------------------------------------------

    async def _list(self, role: Role, path: str, selector: str) -> None:
        """Take what there is as the new truth."""
        pods: dict[str, Pod] = {}
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = _decoded(await self._api.get(path, query), _List)
            pods |= {pod.metadata.name: pod for pod in page.items}
            if not page.metadata.more:
                break
            query["continue"] = page.metadata.more
        self._pods[role] = pods
        self._versions[role] = page.metadata.resource_version

    async def _watch(self, role: Role, path: str, selector: str, tell: Tell) -> None:
        """Apply what changes from the version we have on, until the watch ends. What was applied is remembered
        however it ends: told twice, a pod would go back to what it was."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._versions[role],
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        pods = self._pods[role]
        async with await self._api.lines(path, query) as answer:
            self._well(role)
            while (line := await answer.line(WATCH_SECONDS + 10)) is not None:
                if not line.strip():
                    continue
                event = _decoded(line, _Event)
                if event.type == "ERROR":
                    raise _refused(event)
                if event.type == "BOOKMARK":
                    self._versions[role] = _decoded(event.object, _Bookmark).metadata.resource_version
                    continue
                pod = _decoded(event.object, Pod)
                if event.type == "DELETED":
                    pods.pop(pod.metadata.name, None)
                else:  # ADDED, MODIFIED
                    pods[pod.metadata.name] = pod
                self._versions[role] = pod.metadata.resource_version
                tell(self._found())

    # -- what is told ----------------------------------------------------------------------------

    def _found(self) -> list[Found]:
        found: list[Found] = []
        bad: dict[str, str] = {}
        for role in ROLES:
            for pod in self._pods.get(role, {}).values():
                try:
                    engine = engine_in(pod, role, self._settings.revision_label)
                except BadPodError as error:
                    bad[pod.metadata.name] = str(error)
                    continue
                if engine is not None:
                    found.append(engine)
        for name, why in bad.items():
            if self._bad.get(name) != why:
                log.error("kubernetes: %s. It is not used", why)
        self._bad = bad
        return found

    def _well(self, role: Role) -> None:
        if self._troubles.pop(role, None) is not None:
            log.info("kubernetes: the API answers again for %s pods", role)

    def _ill(self, role: Role, why: str) -> None:
        if role not in self._troubles:
            log.warning("kubernetes: %s. The engines found last stay", why)
        self._troubles[role] = why


def _decoded(data: bytes | msgspec.Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(f"what answers is not the Kubernetes API: {error}") from None


def _refused(event: _Event) -> ApiError:
    error = _decoded(event.object, _Error)
    text = f"the watch ended: {error.code} {error.message}"
    return GoneError(text) if error.code == 410 else ApiError(text)
