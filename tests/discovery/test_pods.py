"""What a pod says of the engine in it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.discovery.scene import pod
from trio_pdproxy.engines.discovery.pods import ANNOTATION, BadPodError, Pod, engine_in
from trio_pdproxy.engines.discovery.source import Found

LABEL = "trio-pdproxy/revision"


def read(changes: dict[str, Any]) -> Found | None:
    """The engine of an ordinary pod with some parts of it replaced, by dotted names."""
    raw = pod("d0", "decode", "10.1.2.3")
    for place, value in changes.items():
        *parents, last = place.split(".")
        inner: Any = raw
        for name in parents:
            inner = inner[name]
        inner[last] = value
    return engine_in(msgspec.json.decode(msgspec.json.encode(raw), type=Pod), "decode", LABEL)


def annotated(text: str) -> dict[str, Any]:
    return {"metadata.annotations": {ANNOTATION: text}}


def container(**fields: Any) -> dict[str, Any]:
    return {"spec.containers": [{"name": "sidecar"}, {"name": "vllm", **fields}]}


@pytest.mark.parametrize(
    ("changes", "url", "side_channel"),
    [
        ({}, "http://10.1.2.3:8100", "10.1.2.3:5601"),
        ({"status.podIP": "fd00::7"}, "http://[fd00::7]:8100", "[fd00::7]:5601"),
        (container(), "http://10.1.2.3:8000", "10.1.2.3:5600"),
        (container(ports=[{"containerPort": 9000}]), "http://10.1.2.3:9000", "10.1.2.3:5600"),
        (
            container(ports=[{"containerPort": 9000}, {"containerPort": 9001, "name": "other"}]),
            "http://10.1.2.3:8000",
            "10.1.2.3:5600",
        ),
        (
            container(env=[{"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": "5700"}, {"name": "A", "valueFrom": {}}]),
            "http://10.1.2.3:8000",
            "10.1.2.3:5700",
        ),
        (annotated("port=8200;side_channel_port=5800"), "http://10.1.2.3:8200", "10.1.2.3:5800"),
    ],
)
def test_where_it_is(changes: dict[str, Any], url: str, side_channel: str) -> None:
    found = read(changes)
    assert found is not None
    assert found.ready
    assert found.spec.name == "d0"
    assert (found.spec.url, str(found.spec.side_channel)) == (url, side_channel)


def test_what_is_said_about_it() -> None:
    found = read(annotated("max_inflight=7; lease=90s") | {"metadata.labels": {LABEL: "r7"}})
    assert found is not None
    assert (found.spec.max_inflight, found.spec.lease, found.spec.revision) == (7, 90.0, "r7")
    assert read({"metadata.labels": {}}) == read({})  # the selector has selected it already


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata.deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"status.phase": "Pending"},
        {"status.phase": "Failed"},
        {"status.podIP": ""},
        {"status.podIP": "169.254.169.254"},
        {"status": {}},
    ],
)
def test_pods_without_an_engine(changes: dict[str, Any]) -> None:
    assert read(changes) is None


@pytest.mark.parametrize(
    "conditions", [None, [], [{"type": "Ready", "status": "False"}], [{"type": "Initialized", "status": "True"}]]
)
def test_pods_that_are_not_ready(conditions: Any) -> None:
    found = read({"status.conditions": conditions})
    assert found is not None
    assert not found.ready


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_inflight=many", "whole number"),
        ("port=http", "invalid literal"),
        ("port=99999", "port"),
        ("speed=9", "no such setting"),
        ("8000", "key=value"),
        ("name=other", "follows from the pod"),
        ("url=http://evil:80", "key=value"),
        ("side_channel=10.9.9.9:1", "follows from the pod"),
        ("max_inflight=1@evil", "key=value"),
    ],
)
def test_annotations_that_are_wrong_name_the_pod(text: str, words: str) -> None:
    with pytest.raises(BadPodError, match=r"d0.*") as caught:
        read(annotated(text))
    assert words in str(caught.value)
