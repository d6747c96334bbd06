"""A YAML file as plain values, with the line of each: what is wrong with a value can then be told with its place."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

Loc = tuple[int | str, ...]
_MERGE = "tag:yaml.org,2002:merge"
_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))


@dataclass(slots=True)
class Read:
    """What a file holds. `lines`: of each value, by where it is in `value`. `problems`: (place, message) pairs."""

    path: Path
    value: object = None
    lines: dict[Loc, int] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def place(self, loc: Loc) -> str:
        """`file:line` of a value, or of the nearest that holds it."""
        for n in range(len(loc), -1, -1):
            if loc[:n] in self.lines:
                return f"{self.path}:{self.lines[loc[:n]]}"
        return str(self.path)


def read(path: Path) -> Read:
    """Read a YAML file. Never raises: what is wrong with it is in the `problems`."""
    found = Read(path)
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8-sig"))
        try:
            root = loader.get_single_node()
            if root is not None:
                found.value = _Builder(loader, found).build(root, ())
        finally:
            loader.dispose()
    except OSError as error:
        found.problems.append((str(path), f"cannot be read: {error.strerror}"))
    except UnicodeDecodeError:
        found.problems.append((str(path), "cannot be read: it is not UTF-8 text"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        found.problems.append((place, f"is not valid YAML: {error.problem or error.context}"))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        found.problems.append((str(path), f"is not valid YAML: {' '.join(str(error).split())}"))
    return found


class _Builder:
    def __init__(self, loader: yaml.SafeLoader, found: Read) -> None:
        self.loader, self.found = loader, found

    def build(self, node: yaml.Node, loc: Loc) -> object:
        self.found.lines.setdefault(loc, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*loc, i)) for i, item in enumerate(node.value)]
        # A date or anything else YAML would make of bare words is text here.
        return self.loader.construct_object(node) if node.tag in _PLAIN else node.value

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, object]:
        seen: dict[str, int] = {}
        for key, _ in node.value:  # before merge keys (<<) are resolved: those may be overridden
            line = key.start_mark.line + 1
            if key.tag != _MERGE and str(key.value) in seen:
                text = f"{key.value!r} is given twice, first in line {seen[str(key.value)]}"
                self.found.problems.append((f"{self.found.path}:{line}", text))
            seen.setdefault(str(key.value), line)
        self.loader.flatten_mapping(node)
        values: dict[str, object] = {}
        for key, value in node.value:
            name = str(key.value)
            self.found.lines[(*loc, name)] = key.start_mark.line + 1
            values[name] = self.build(value, (*loc, name))
        return values
