"""What needs two things in one instant, or an end of the whole, on many schedules."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from trio_pdproxy.engines.pool import Want
from trio_pdproxy.sim import SimSettings
from trio_pdproxy.testing import grown, one_outcome, open_memory_rig, run_seeded

ONE_PLACE: dict[str, Any] = {"prefill_max_inflight": 1, "decode_max_inflight": 1}


def test_a_place_that_comes_free_as_its_waiter_leaves_is_not_lost() -> None:
    async def scenario() -> dict[str, int]:
        async with open_memory_rig(**ONE_PLACE) as rig:
            pool = rig.app.pool
            taken = await pool.take(Want(pair=True))

            async def wait_and_leave() -> None:
                with trio.move_on_at(leaves):
                    for engine in await pool.take(Want(pair=True)):
                        pool.give_back(engine)

            async def give_back() -> None:
                await trio.sleep_until(leaves)
                for engine in taken:
                    pool.give_back(engine)

            leaves = trio.current_time() + 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_and_leave)
                nursery.start_soon(give_back)
            return rig.leftovers()

    assert one_outcome(scenario, range(40)) == {}


def test_a_place_that_comes_free_as_its_waiter_runs_out_of_time_is_not_lost() -> None:
    async def scenario() -> dict[str, int]:
        async with open_memory_rig(**ONE_PLACE, queue_timeout=1, jitter=3) as rig:
            taken = await rig.app.pool.take(Want(pair=True))

            async def give_back() -> None:
                await trio.sleep(1)
                for engine in taken:
                    rig.app.pool.give_back(engine)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(give_back)
                await rig.visit(stream=True, max_tokens=2)  # served or refused: here both are right
            await rig.visit(stream=True, max_tokens=2)
            await rig.ended()
            assert rig.report.outcome == "ok"
            return rig.leftovers()

    for seed in range(40):
        assert run_seeded(scenario, seed) == {}


def test_a_stopping_server_ends_requests_after_its_grace_and_still_pays_their_debts() -> None:
    async def scenario() -> tuple[object, ...]:
        async with open_memory_rig(sim=SimSettings(prefill_base=8), shutdown_grace=3, jitter=3) as rig:
            began = trio.current_time()
            rig.engines.start_soon(rig.visit)  # outlives the block below, as a client does
            await trio.sleep(1)
        ended = trio.current_time() - began
        report = rig.app.recent[-1]
        sims = rig.cluster
        return report.outcome, report.dispatches[0].debt.value, sims.decode[0].blocks_held, round(ended)

    assert one_outcome(scenario) == ("disconnect", "paid", 0, 8)


def test_a_kept_alive_client_connection_has_nothing_of_its_last_request() -> None:
    async def scenario() -> None:
        async with open_memory_rig(jitter=3) as rig:
            await rig.stream(max_tokens=2)
            await rig.quiet()
            idle = rig.tasks()
            for _ in range(3):
                await rig.stream(max_tokens=2)
                await rig.post(max_tokens=2)
                await rig.quiet()
                assert not grown(idle, rig.tasks())

    one_outcome(scenario)


def test_a_client_that_closes_with_the_last_byte_leaves_no_connection() -> None:
    async def scenario() -> None:
        async with open_memory_rig() as rig:
            await rig.visit(stream=True, max_tokens=2)
            await trio.sleep(1)
            await wait_all_tasks_blocked()
            assert not rig.server.child_tasks

    run_seeded(scenario, 0)
