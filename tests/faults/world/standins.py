"""What stands in for `threading`, `time` and `Future` in the modules of the stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.faults.world.scheduler import Scheduler, Task

EPOCH = 1_800_000_000.0


class Lock:
    """`Lock` and `RLock`, which any task may have to wait for."""

    def __init__(self, scheduler: Scheduler, reentrant: bool) -> None:
        self._scheduler, self._reentrant = scheduler, reentrant
        self.owner: Task | None = None
        self.depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._scheduler.current
        self._scheduler.pause()
        if me is None or (self._reentrant and self.owner is me):
            self.depth += 1
            return True
        while self.depth:
            if not blocking:
                return False
            self._waiting.append(me)
            if not self._scheduler.block(None if timeout < 0 else timeout):
                return False
        self.owner, self.depth = me, 1
        return True

    def release(self) -> None:
        self.depth = max(0, self.depth - 1)
        if not self.depth:
            self.owner = None
            waiting, self._waiting = self._waiting, []
            for task in waiting:
                self._scheduler.wake(task)

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._lock = scheduler, Lock(scheduler, reentrant=True)
        self._waiting: list[Task] = []

    def __enter__(self) -> Condition:
        self._lock.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        me, depth = self._scheduler.current, self._lock.depth
        assert me is not None
        self._waiting.append(me)
        self._lock.depth = 1
        self._lock.release()
        woken = self._scheduler.block(timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        self._lock.acquire()
        self._lock.depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self) -> None:
        if self._waiting:
            self._scheduler.wake(self._waiting.pop(0))

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._scheduler.wake(task)


class Semaphore:
    def __init__(self, scheduler: Scheduler, value: int) -> None:
        self._changed, self._value = Condition(scheduler), value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._value > 0, timeout if blocking else 0):
                return False
            self._value -= 1
            return True

    def release(self) -> None:
        with self._changed:
            self._value += 1
            self._changed.notify_all()


class Future:
    def __init__(self, scheduler: Scheduler) -> None:
        self._changed = Condition(scheduler)
        self._answer: tuple[Any, BaseException | None] | None = None

    def set_result(self, result: Any) -> None:
        self._set((result, None))

    def set_exception(self, error: BaseException) -> None:
        self._set((None, error))

    def _set(self, answer: tuple[Any, BaseException | None]) -> None:
        with self._changed:
            self._answer = answer
            self._changed.notify_all()

    def result(self, timeout: float | None = None) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: self._answer, timeout):
                raise TimeoutError
            result, error = self._answer or (None, None)
        if error is not None:
            raise error
        return result


class Thread:
    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self._scheduler, self._target, self._args, self.name = scheduler, target, args, name
        self._task: Task | None = None

    def start(self) -> None:
        assert self._scheduler.current is not None
        process = self._scheduler.current.process
        self._task = self._scheduler.spawn(lambda: self._target(*self._args), process, f"{process.name} {self.name}")

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class Threading:
    """The module `threading`, as far as stores use it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.Lock = lambda: Lock(scheduler, reentrant=False)
        self.RLock = lambda: Lock(scheduler, reentrant=True)
        self.Condition = lambda: Condition(scheduler)
        self.BoundedSemaphore = lambda value: Semaphore(scheduler, value)
        self.Thread = lambda **given: Thread(scheduler, **given)


class Time:
    """The module `time`: monotonic for all, and wall clocks that jump, one for each host."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now

    def time(self) -> float:
        task = self._scheduler.current
        host = None if task is None else task.process.host
        return EPOCH + self._scheduler.now + (0.0 if host is None else host.jumped)

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)
