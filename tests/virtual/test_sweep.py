"""Every request given up at every step: nothing is left behind (I1, I2, I8)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.virtual.conftest import TALLY
from tests.virtual.scenes import QUEUED, SCENES, Scene
from trio_pdproxy.testing import (
    Cut,
    StepTrap,
    Swept,
    When,
    client_closes,
    open_memory_rig,
    run_seeded,
    scope_cancelled,
    server_cancels,
    sweep,
)

WAYS: tuple[Callable[..., Cut], ...] = (client_closes, server_cancels, scope_cancelled)


async def _sweep(scene: Scene, trap: StepTrap, way: Callable[..., Cut], jitter: int) -> Swept:
    async with open_memory_rig(*scene.pairs, sim=scene.sim, jitter=jitter, **scene.settings) as rig:
        return await sweep(rig, trap, way(**scene.body), prepare=scene.prepare, strands=scene.strands)


def _check(scene: Scene, way: Callable[..., Cut], when: When, *, seed: int = 0, jitter: int = 0) -> None:
    trap = StepTrap(when)
    swept = run_seeded(partial(_sweep, scene, trap, way, jitter), seed, instruments=[trap])
    TALLY.cancellations += swept.injected
    TALLY.leftovers += len(swept.wrong)
    assert not swept.wrong, "\n".join(swept.wrong)


@pytest.mark.parametrize("when", ["blocked", "woken"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("scene", [*SCENES, QUEUED], ids=lambda scene: scene.name)
def test_a_request_given_up_at_any_step_leaves_nothing_behind(
    scene: Scene, way: Callable[..., Cut], when: When
) -> None:
    _check(scene, way, when)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
@pytest.mark.parametrize("when", ["blocked", "woken"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("scene", [*SCENES, QUEUED], ids=lambda scene: scene.name)
def test_nor_on_another_schedule(scene: Scene, way: Callable[..., Cut], when: When, seed: int) -> None:
    _check(scene, way, when, seed=seed, jitter=2)
