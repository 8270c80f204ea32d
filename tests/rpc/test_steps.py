import asyncio

import pytest

from tierkv.errors import DeadlineExceeded
from tierkv.rpc.steps import Steps

NEVER_S = 60.0
SOON_S = 0.02


async def after(seconds: float, value: object = None) -> object:
    await asyncio.sleep(seconds)
    return value


async def test_what_comes_in_time_is_given_and_what_fails_fails():
    async def failing() -> None:
        raise KeyError("x")

    with Steps("box:1") as steps:
        assert await steps.wait(after(0, "a"), NEVER_S, "nothing") == "a"
        with pytest.raises(KeyError):
            await steps.wait(failing(), NEVER_S, "nothing")
        assert await steps.wait(after(0, "b"), NEVER_S, "nothing") == "b"


async def test_each_wait_has_its_own_limit_whatever_the_one_before_had():
    with Steps("box:1") as steps:
        await steps.wait(after(0), NEVER_S, "nothing")
        with pytest.raises(DeadlineExceeded, match=r"box:1.*no data for 0\.02 s"):
            await steps.wait(asyncio.Event().wait(), SOON_S, "no data")
        # The task goes on as if nothing had been cancelled, and the next wait may take longer.
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert await steps.wait(after(3 * SOON_S, "late"), NEVER_S, "nothing") == "late"


async def test_time_between_two_waits_counts_for_neither():
    with Steps("box:1") as steps:
        await steps.wait(after(0), SOON_S, "nothing")
        await asyncio.sleep(3 * SOON_S)
        assert await steps.wait(after(0, "here"), SOON_S, "nothing") == "here"
        await asyncio.sleep(3 * SOON_S)


async def test_a_long_row_of_waits_keeps_one_timer():
    loop = asyncio.get_running_loop()
    armed = []

    class Counting(Steps):
        def _begin(self, task, seconds):
            super()._begin(task, seconds)
            armed.append(self._timer)

    with Counting("box:1") as steps:
        for _ in range(200):
            await steps.wait(asyncio.sleep(0), NEVER_S, "nothing")
        assert len(set(map(id, armed))) == 1
    assert armed[0].cancelled()
    assert loop.is_running()


async def test_a_cancellation_from_outside_stays_one():
    began = asyncio.Event()

    async def waiting() -> None:
        with Steps("box:1") as steps:
            began.set()
            await steps.wait(asyncio.Event().wait(), NEVER_S, "nothing")

    task = asyncio.create_task(waiting())
    await began.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_cancelled_from_outside_and_over_at_once_it_is_cancelled():
    async def waiting() -> None:
        with Steps("box:1") as steps:
            await steps.wait(stubborn(), SOON_S, "nothing")

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            task.cancel()
            raise

    task = asyncio.create_task(waiting())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_two_tasks_may_take_turns():
    with Steps("box:1") as steps:
        first = asyncio.create_task(steps.wait(after(0, 1), NEVER_S, "nothing"))
        assert await first == 1
        with pytest.raises(DeadlineExceeded):
            await steps.wait(asyncio.Event().wait(), SOON_S, "nothing")


async def test_a_wait_can_be_ended_from_elsewhere_with_a_reason():
    loop = asyncio.get_running_loop()
    with Steps("box:1") as steps:
        steps.fail(KeyError("nobody waits"))
        assert steps.waiting_s == 0
        loop.call_later(SOON_S, lambda: steps.fail(OSError("it hangs")))
        with pytest.raises(OSError, match="it hangs"):
            await steps.wait(asyncio.Event().wait(), NEVER_S, "nothing")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        # The reason was that wait's alone.
        with pytest.raises(DeadlineExceeded):
            await steps.wait(asyncio.Event().wait(), SOON_S, "no data")
        loop.call_later(SOON_S, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await steps.wait(asyncio.Event().wait(), NEVER_S, "nothing")
        task.uncancel()
        seen = []
        loop.call_later(SOON_S, lambda: seen.append(steps.waiting_s))
        await steps.wait(after(3 * SOON_S), NEVER_S, "nothing")
        assert seen[0] > 0
