"""What the documentation says of settings, metrics, outcomes and tables is what the code says."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, every_block
from trio_pdproxy.config import load_settings
from trio_pdproxy.observe.metrics import OUTCOMES, Metrics
from trio_pdproxy.render import reference

OTHERS = ("launch", "api", "security", "observability", "bench", "performance")
"""Pages that are written beside these."""
WITH_OTHERS = {f"docs/{name}.md" for name in OTHERS}


def test_the_configuration_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == reference.configuration(), "run: trio-pdproxy render configuration > docs/configuration.md"


def test_the_states_of_a_request_are_drawn_from_the_tables() -> None:
    page = (ROOT / "docs/design.md").read_text()
    _, rest = page.split("<!-- made by `trio-pdproxy render request` -->\n\n")
    drawn, _ = rest.split("\n<!-- end -->")
    assert drawn == reference.request(), "put what `trio-pdproxy render request` prints into docs/design.md"


def test_every_outcome_and_every_metric_is_explained() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    for outcome in OUTCOMES:
        assert f"| `{outcome}` |" in page
    samples = re.findall(r"^# TYPE (pdproxy_\w+) ", Metrics().render()[0].decode(), re.MULTILINE)
    assert len(samples) > 10
    for name in samples:
        assert f"`{name}`" in page, f"docs/operations.md does not say what {name} means"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if target.startswith("https://"):
            continue
        found = (ROOT / page).parent / target
        name = str(found.resolve().relative_to(ROOT))
        assert found.exists() or name in WITH_OTHERS, f"{page} links to {target}"


def test_configuration_in_the_pages_is_valid() -> None:
    found = [text for _, text in every_block("yaml") if "prefill:" in text]
    assert found
    for text in found:
        assert load_settings(environ={}, flags=yaml.safe_load(text)).prefill
