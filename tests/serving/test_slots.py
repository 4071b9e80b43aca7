"""Slots of coroutines: bounded, in turn, given back whatever happens."""

import asyncio

import pytest

from blendkv.loading.queues import POLICIES
from blendkv.serving.slots import Full, Slots


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


@pytest.mark.parametrize("policy", POLICIES)
def test_bounded_and_all_are_served(policy):
    async def main():
        slots, now, most, done = Slots(3, policy), 0, 0, 0

        async def work(client):
            nonlocal now, most, done
            with await slots.take(client, 1000):
                now += 1
                most = max(most, now)
                await asyncio.sleep(0.001)
                now -= 1
                done += 1

        await asyncio.gather(*(work(n % 5) for n in range(60)))
        assert (most, done, slots.taken, slots.waiting) == (3, 60, 0, 0)

    run(main())


def test_a_light_client_is_not_stuck():
    async def main():
        order, slots = [], Slots(1, waiting=1000)

        async def work(client):
            with await slots.take(client, 1 << 20):
                order.append(client)
                await asyncio.sleep(0)

        flood = [asyncio.create_task(work("flood")) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.gather(work("light"), *flood)
        assert order.index("light") < 8  # after the flood's turn, which had begun

    run(main())


def test_cancelled_before_and_after_its_turn():
    async def main():
        slots = Slots(1)
        held = await slots.take("a", 1)
        waiting = [asyncio.create_task(slots.take("b", 1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert slots.waiting == 2
        held.release()  # the second one's turn, which has not run yet
        waiting[1].cancel()
        third = await waiting[2]
        assert (slots.taken, slots.waiting) == (1, 0)
        third.release()
        third.release()
        assert slots.taken == 0
        assert not slots._of

    run(main())


def test_its_time_is_up():
    async def main():
        slots = Slots(1)
        slow = await slots.take("slow", 1, 0.02)
        (await slots.take("next", 1)).release()
        slow.release()  # once more gives nothing away
        assert slots.taken == 0
        (await slots.take("again", 1, 0.02)).release()
        held = await slots.take("other", 1)
        await asyncio.sleep(0.05)  # the timer of the one before is gone
        assert slots.taken == 1
        held.release()

    run(main())


def test_too_much_of_one_client():
    async def main():
        slots = Slots(1, waiting=2)
        held = await slots.take("a", 1)
        tasks = [asyncio.create_task(slots.take("a", 1)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Full):
            await slots.take("a", 1)
        other = asyncio.create_task(slots.take("b", 1))
        held.release()
        for task in (*tasks, other):
            (await task).release()

    run(main())
