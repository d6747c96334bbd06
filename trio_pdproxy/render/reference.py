"""Pages of the documentation that are made from the code: every setting, and what becomes of a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trio_pdproxy.config import ROLES, EngineSpec, Settings
from trio_pdproxy.config.settings import SECRETS
from trio_pdproxy.core.verdict import Debt, Decode, Facts, Prefill, Step, decide

# -- settings ------------------------------------------------------------------------------------


def configuration() -> str:
    """docs/configuration.md."""
    return "\n".join([*_head(), *_table(Settings), *_engine_head(), *_table(EngineSpec), ""])


def _head() -> Iterator[str]:
    yield from (
        "# Configuration",
        "",
        "<!-- Made by `trio-pdproxy render configuration`. Edit the models in trio_pdproxy/config, not this page. -->",
        "",
        "Flags beat the environment, the environment beats the YAML file (`--config FILE`, or `PDPROXY_CONFIG`). The",
        "names are the same everywhere: `idle_timeout` in the file, `PDPROXY_IDLE_TIMEOUT`, `--idle-timeout`. What",
        "is given in a higher place replaces the lower one's whole value. A wrong configuration gives one message",
        "with every problem and its place, exit code 2, and starts nothing.",
        "",
        "Durations are seconds or carry a unit (`500ms`, `30s`, `2m`, `1h`), sizes are bytes or carry one (`128MiB`).",
        "",
        "```yaml",
        "prefill:",
        "  - url: http://10.0.0.1:8100",
        "    lease: 30",
        "decode:",
        "  - http://10.0.0.2:8200;max_inflight=128",
        "bind: 0.0.0.0:8000",
        "```",
        "",
        "Some settings only work together: a lease ends before the rescue point, a prefill within the time it may",
        "settle, and so on. These rules are checked at the start and the message gives the reason.",
        "",
        "## Settings",
        "",
    )


def _engine_head() -> Iterator[str]:
    yield from (
        "",
        "## An engine's entry",
        "",
        "As a mapping in the file, or as text everywhere: `URL[;key=value]...`, several separated by commas.",
        "What is learned from the engine needs no entry.",
        "",
    )


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    for name, field in model.model_fields.items():
        note = (
            " No flag: a process list shows flags." if name in SECRETS and "flag" not in str(field.description) else ""
        )
        yield f"| `{name}` | {_default(name, field)} | {_cell(str(field.description))}{note} |"


def _default(name: str, field: FieldInfo) -> str:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "shown_default" in extra:
        return _cell(str(extra["shown_default"]))
    if field.is_required():
        return "required"
    if field.default in (None, (), ""):
        return "none" if name not in ROLES else "required, unless `discovery` finds them"
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# -- one request ---------------------------------------------------------------------------------

_SHOWN: dict[Step, tuple[str, str]] = {
    Step.WAIT: ("held", "status held back"),
    Step.RELAY: ("relay", "200, decode's bytes"),
    Step.END: ("done", "complete"),
    Step.DECODE_ANSWER: ("refused_d", "decode's 4xx, verbatim"),
    Step.PREFILL_ANSWER: ("refused_p", "prefill's 4xx, verbatim"),
    Step.ANOTHER_PAIR: ("again", "another pair, fresh ids"),
    Step.FAIL: ("failed", "504"),
    Step.CUT: ("cut", "error event, no clean end"),
}

_BEFORE = (Decode.UNSENT, Decode.WAITING)
_AFTER = (Decode.CUT, Decode.DONE)


def request_diagram() -> str:
    """The states of a request as a mermaid diagram: every arrow is what `decide` says."""
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{words}" as {name}' for name, words in _SHOWN.values()]
    lines.append("    [*] --> held: both legs sent")
    lines += _arrows("held", ((p, None) for p in Prefill), _causes_of_prefill())
    lines += _arrows("held", ((None, d) for d in Decode if d not in _BEFORE + _AFTER), _causes_of_decode())
    lines += _arrows("relay", ((None, d) for d in _AFTER), _causes_of_decode())
    lines.append("    again --> held: a pair is left")
    lines.append("    again --> failed: none is left (502, 503, or as the engine said)")
    lines += [
        f"    {_SHOWN[step][0]} --> [*]" for step in _SHOWN if step not in (Step.WAIT, Step.RELAY, Step.ANOTHER_PAIR)
    ]
    return "\n".join(lines)


def _causes_of_prefill() -> dict[tuple[Prefill | None, Decode | None], Step]:
    return {(p, None): decide(Facts(p, Decode.WAITING, rescued=True)).step for p in Prefill}


def _causes_of_decode() -> dict[tuple[Prefill | None, Decode | None], Step]:
    return {(None, d): decide(Facts(Prefill.PENDING, d)).step for d in Decode}


def _arrows(
    start: str,
    causes: Iterable[tuple[Prefill | None, Decode | None]],
    steps: dict[tuple[Prefill | None, Decode | None], Step],
) -> Iterator[str]:
    by_step: dict[Step, list[str]] = {}
    side = ""
    for cause in causes:
        side = "prefill" if cause[0] is not None else "decode"
        fact = cause[0] or cause[1]
        assert fact is not None
        by_step.setdefault(steps[cause], []).append(fact.value)
    for step, facts in by_step.items():
        if _SHOWN[step][0] != start:
            yield f"    {start} --> {_SHOWN[step][0]}: {side} {', '.join(facts)}"


def debt_table() -> str:
    """What is owed to the decode engine, as Markdown: what prefill has come to, against what decode has."""
    columns = list(Decode)
    lines = ["| prefill \\ decode | " + " | ".join(d.value for d in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for p in Prefill:
        cells = []
        for d in columns:
            first, second = decide(Facts(p, d)).debt, decide(Facts(p, d, rescued=True)).debt
            cells.append(_debt(first) if first is second else f"{_debt(first)}, then {_debt(second)}")
        lines.append(f"| **{p.value}** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _debt(debt: Debt) -> str:
    return "-" if debt is Debt.NONE else debt.value


def request() -> str:
    """The part of docs/design.md that is made from the verdict's tables."""
    return "\n".join(["```mermaid", request_diagram(), "```", "", debt_table(), ""])
