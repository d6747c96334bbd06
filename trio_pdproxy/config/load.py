"""From files, environment and flags to `Settings`, with one error for all that is wrong.

Each source gives values with the place each came from. The places are kept beside the merged values,
so that whatever the models find wrong can be told as `proxy.yaml:7`, `PDPROXY_LEASE` or `--lease`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import yaml
from pydantic import ValidationError

from trio_pdproxy.config.engine import ROLES, split_specs
from trio_pdproxy.config.problems import Loc, Problem, hint, problems_of
from trio_pdproxy.config.settings import SECRETS, Settings

PREFIX = "PDPROXY_"
# Variables with our prefix that are no settings.
OTHER_VARIABLES = frozenset({"PDPROXY_CONFIG", "PDPROXY_ENGINES_HOME"})
_MERGE = "tag:yaml.org,2002:merge"
_SECRET_FORMS = frozenset(name + form for name in SECRETS for form in ("", "_file"))


class ConfigError(ValueError):
    """The configuration is wrong. `str()` lists every problem, one a line, each with its place.

    `problems`: the same as (place, message) pairs; the place is "" where something is missing everywhere.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        number = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{place}: {message}" if place else message for place, message in self.problems]
        super().__init__("\n  - ".join([f"the configuration has {number}:", *lines]))


@dataclass(slots=True)
class _Source:
    """What one source gives. `unread`: it could not be read at all, so what it gives is not known."""

    values: dict[str, object] = field(default_factory=dict)
    places: dict[Loc, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)
    unread: bool = False

    def give(self, name: str, value: object, place: str) -> None:
        """Take a setting from text or flags, where engines come as lists of specs."""
        self.places[(name,)] = place
        if name in ROLES:
            texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
            specs = [s for text in texts for s in (split_specs(text) if isinstance(text, str) else [text])]
            for i, _ in enumerate(specs):
                self.places[(name, i)] = place if len(specs) == 1 else f"{place} (engine {i + 1})"
            value = specs
        self.values[name] = value


def load_settings(
    *,
    file: Path | None = None,
    environ: Mapping[str, str],
    flags: Mapping[str, object] = MappingProxyType({}),
) -> Settings:
    """The settings that `flags`, over `environ` (PDPROXY_*), over a YAML file give.

    `file`: the YAML file; None: the one that PDPROXY_CONFIG names, if it does. `flags`: by setting name;
    None and () mean not given. A setting given in a higher source replaces the lower one's whole value
    (`prefill` and `decode` as whole lists), and a lower value that is replaced is not looked at. A
    variable set to nothing counts as not set. A relative `*_file` inside the YAML file is relative to it.

    Raises `ConfigError`, which lists every problem of all the sources; nothing else.
    """
    file_place = "--config"
    if file is None and environ.get("PDPROXY_CONFIG"):
        file, file_place = Path(environ["PDPROXY_CONFIG"]), "PDPROXY_CONFIG"
    sources = [_from_file(file, file_place)] if file is not None else []
    sources += [_from_environment(environ), _from_flags(flags)]

    merged = _Source()
    for source in sources:
        for name in source.values:
            _forget(merged, name)
        merged.values |= source.values
        merged.places |= source.places
        merged.problems += source.problems
        merged.unread |= source.unread
    try:
        settings = Settings.model_validate(merged.values)
    except ValidationError as error:
        for problem in problems_of(error, known=Settings.model_fields):
            # With a file that could not be read, what is missing or does not fit may well be in it.
            if not (merged.unread and problem.between):
                place = _place(problem, merged.places)
                # A variable or a flag is named by its place, a line of a file or of a list is not.
                bare = problem.between or not isinstance(problem.loc[-1], str)
                bare = bare or place in (_variable(str(problem.loc[0])), _flag(str(problem.loc[0])))
                text = problem.message if bare else f"{problem.loc[-1]}: {problem.message}"
                merged.problems.append((place, text))
    if merged.problems:
        raise ConfigError(sorted(merged.problems, key=lambda problem: _line(problem[0])))
    return settings


def _forget(merged: _Source, name: str) -> None:
    """Remove a lower source's value, and of a secret its other form too: they are one setting."""
    names = {name, name.removesuffix("_file"), f"{name}_file"} if name in _SECRET_FORMS else {name}
    for other in names:
        merged.values.pop(other, None)
    for loc in [loc for loc in merged.places if loc[0] in names]:
        del merged.places[loc]


def _place(problem: Problem, places: Mapping[Loc, str]) -> str:
    """Where the values of a problem were given; defaults have no place."""
    found: list[str] = []
    for loc in (problem.loc, *problem.also):
        near = (places[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in places)
        if (place := next(near, None)) is not None:
            found.append(place)
    return ", ".join(dict.fromkeys(found))


def _line(place: str) -> float:
    """Sorts the problems of a file by line, before all others; those stay in the order they were found."""
    number = re.match(r".*?:(\d+)(?:,|$)", place)
    return int(number[1]) if number else math.inf


def _from_environment(environ: Mapping[str, str]) -> _Source:
    source = _Source()
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if variable != _variable(name) or name not in Settings.model_fields:
            names = [*Settings.model_fields, *(v.removeprefix(PREFIX).lower() for v in OTHER_VARIABLES)]
            source.problems.append((variable, f"there is no such variable{hint(name, names, _variable)}"))
        elif text.strip():
            source.give(name, text, variable)
    return source


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _from_flags(flags: Mapping[str, object]) -> _Source:
    source = _Source()
    for name, value in flags.items():
        place = _flag(name)
        if value is None or value == ():
            continue
        if name in _SECRET_FORMS:
            advice = f"give it as {_variable(name)} or in the configuration file"
            source.problems.append((place, f"is never a flag, because a process list shows flags: {advice}"))
        elif name not in Settings.model_fields:
            source.problems.append((place, f"there is no such flag{hint(name, Settings.model_fields, _flag)}"))
        else:
            source.give(name, value, place)
    return source


def _from_file(path: Path, named_by: str) -> _Source:
    source = _Source()
    loader: yaml.SafeLoader | None = None
    try:
        text = path.read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        _FileReader(path, loader, source).read(root)
    except OSError as error:
        source.problems.append((named_by, f"cannot read {path}: {error.strerror}"))
    except UnicodeDecodeError:
        source.problems.append((named_by, f"cannot read {path}: it is not UTF-8 text"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        source.problems.append((place, f"is not valid YAML: {error.problem or error.context}"))
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        source.problems.append((str(path), f"is not valid YAML: {reason}"))
    else:
        return source
    finally:
        if loader is not None:
            loader.dispose()
    source.unread = True
    return source


class _FileReader:
    """Reads the nodes of one YAML file into a source, with the line of every key."""

    def __init__(self, path: Path, loader: yaml.SafeLoader, source: _Source) -> None:
        self.path, self.loader, self.source = path, loader, source

    def read(self, root: yaml.Node | None) -> None:
        """Take all settings of the file."""
        if root is None:
            return  # an empty file
        if not isinstance(root, yaml.MappingNode):
            self.problem(root, "the file must hold settings as `name: value` lines")
            self.source.unread = True
            return
        for name, key, value in self.entries(root):
            if name not in Settings.model_fields:
                self.problem(key, f"there is no setting {name!r}{hint(name, Settings.model_fields)}")
                continue
            self.source.places[(name,)] = self.place(key)
            if name in ROLES:
                self.source.values[name] = self.engines(name, value)
            else:
                given = self.value(value)
                if name.endswith("_file") and isinstance(given, str):
                    given = self.path.parent / given
                self.source.values[name] = given

    def engines(self, role: str, node: yaml.Node) -> object:
        """The engines under one role's key: mappings, specs, or one text of specs."""
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        given: list[object] = []
        for item in items:
            loc: Loc = (role, len(given))
            value: object
            if isinstance(item, yaml.MappingNode):
                fields: dict[str, object] = {}
                for name, key, content in self.entries(item):
                    fields[name] = self.value(content)
                    self.source.places[(*loc, name)] = self.place(key)
                value = fields
            else:
                value = self.value(item)
                if value is None and item is node:
                    break  # a key with nothing after it
                if isinstance(value, str):
                    specs = split_specs(value)
                    for i, _ in enumerate(specs, len(given)):
                        self.source.places[(role, i)] = self.place(item)
                    given += specs
                    continue
            self.source.places[loc] = self.place(item)
            given.append(value)
        return given

    def entries(self, node: yaml.MappingNode) -> list[tuple[str, yaml.Node, yaml.Node]]:
        """A mapping's (name, key node, value node); a key that is given twice is a problem."""
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:  # before merge keys (<<) are resolved: those may be overridden
            name = str(self.value(key)) if key.tag != _MERGE else "<<"
            if name in seen:
                line = seen[name].start_mark.line + 1
                self.problem(key, f"{name!r} is given twice, first in line {line}")
            seen.setdefault(name, key)
        try:
            self.loader.flatten_mapping(node)
        except yaml.constructor.ConstructorError as error:
            self.problem(node, f"<< merges mappings only: {error.problem}")
        entries = {str(self.value(key)): (key, value) for key, value in node.value if key.tag != _MERGE}
        return [(name, key, value) for name, (key, value) in entries.items()]

    def value(self, node: yaml.Node) -> object:
        """A scalar as plain Python: text, number, truth value or None. No setting is anything else, so
        a nested list or mapping is given back as its node, which no setting accepts."""
        if not isinstance(node, yaml.ScalarNode):
            return node
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind in ("null", "bool", "int", "float"):
            try:
                value: object = self.loader.construct_object(node)
            except ValueError:
                return node.value  # 0b_ and the like look like numbers and are none
            return value
        if kind not in ("str", "timestamp", "value"):
            self.problem(node, f"the YAML tag {node.tag} is not supported")
        return node.value

    def place(self, node: yaml.Node) -> str:
        return f"{self.path}:{node.start_mark.line + 1}"

    def problem(self, node: yaml.Node, message: str) -> None:
        self.source.problems.append((self.place(node), message))
