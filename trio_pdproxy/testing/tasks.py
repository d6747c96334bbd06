"""What runs below a nursery: a test that lists it before and after a request sees whether anything was left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import trio

Tree = Counter[str]
"""Tasks by their path below a nursery, and how many there are of each."""


def tasks_below(nursery: trio.Nursery) -> Iterator[tuple[str, trio.lowlevel.Task]]:
    """Each task under `nursery`, however deep, with its path: names of functions from the top, joined by ` > `."""
    for task in nursery.child_tasks:
        name = _short(task.name)
        yield name, task
        for below in task.child_nurseries:
            for path, deeper in tasks_below(below):
                yield f"{name} > {path}", deeper


def task_tree(*nurseries: trio.Nursery) -> Tree:
    """The tasks under these nurseries. Equal trees before and after a request: nothing of it is left (I1)."""
    return Counter(path for nursery in nurseries for path, _ in tasks_below(nursery))


def grown(before: Tree, after: Tree) -> Tree:
    """What is in `after` and was not in `before`."""
    return after - before


def is_below(task: trio.lowlevel.Task, root: trio.lowlevel.Task) -> bool:
    """Whether `task` is `root` or runs in a nursery of it, however deep."""
    at: trio.lowlevel.Task | None = task
    while at is not None:
        if at is root:
            return True
        at = at.parent_nursery.parent_task if at.parent_nursery is not None else None
    return False


def _short(name: str) -> str:
    """`a.b.Class.function` as `Class.function`: what tells tasks apart and survives a move to another module."""
    return ".".join(name.removeprefix("functools.partial object at ").split(".")[-2:])
