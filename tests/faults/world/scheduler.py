"""Tasks that take turns, and a clock that moves when nobody can run: one thread, and a seed decides who is next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

MOST_TURNS = 300_000
SWITCH = 0.25
"""How often a task gives way where it may."""


class Killed(BaseException):
    """The process of a task has died: nothing that it does from now on has an effect."""


class Stuck(Exception):
    """Somebody waits, and nothing will ever happen."""


class Process:
    """Tasks that die together, with what they alone know."""

    def __init__(self, name: str, host: Any = None, pid: int = 0) -> None:
        self.name, self.host, self.pid = name, host, pid
        self.dead = False
        self.tasks: list[Task] = []
        self.descriptors: dict[int, Any] = {}
        self.next_descriptor = 3
        self.kill_at = 0
        """Calls to the system until it is killed; 0: it is not."""


class Task:
    """A thread, as the code sees it."""

    def __init__(self, function: Callable[[], Any], process: Process, name: str, parent: greenlet) -> None:
        self.function, self.process, self.name = function, process, name
        self.done, self.blocked, self.late = False, False, False
        self.ticket = 0
        self.error: BaseException | None = None
        self.greenlet = greenlet(self._run, parent)
        process.tasks.append(self)

    def _run(self) -> None:
        try:
            self.function()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.done = True


class Scheduler:
    """Runs tasks until the world is over.

    Attributes:
        now: seconds, monotonic.
        turns: how often a task was resumed.
    """

    def __init__(self, random: Random) -> None:
        self.random, self.now, self.turns = random, 1000.0, 0
        self.current: Task | None = None
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._dying: list[Task] = []
        self._main = getcurrent()
        self._sequence = 0
        self.failed: list[tuple[Task, BaseException]] = []

    # -- what tasks do ----------------------------------------------------------------------------------------------

    def spawn(self, function: Callable[[], Any], process: Process, name: str) -> Task:
        """A new task, which runs when its turn comes."""
        task = Task(function, process, name, self._main)
        self._ready.append(task)
        return task

    def alive(self) -> None:
        """Raises in a task whose process is dead."""
        if self.current is not None and self.current.process.dead:
            raise Killed

    def pause(self, chance: float = SWITCH) -> None:
        """Others may run now."""
        self.alive()
        if self.current is not None and self.random.random() < chance:
            self._ready.append(self.current)
            self._leave()

    def sleep(self, seconds: float) -> None:
        """Others run, for so long."""
        self.block(seconds)

    def block(self, seconds: float | None = None) -> bool:
        """Waits to be woken; False if it took longer than that."""
        self.alive()
        task = self.current
        if task is None:
            raise Stuck("what is no task must not wait")
        task.blocked, task.late = True, False
        if seconds is not None:
            self._sequence += 1
            heapq.heappush(self._timers, (self.now + max(0.0, seconds), self._sequence, task, task.ticket))
        self._leave()
        return not task.late

    def wake(self, task: Task) -> None:
        """Ends the waiting of a task."""
        if task.blocked and not task.done:
            task.blocked = False
            task.ticket += 1
            self._ready.append(task)

    def kill(self, process: Process) -> None:
        """Ends a process between two instants."""
        process.dead = True
        self._dying += process.tasks
        process.tasks = []

    def _leave(self) -> None:
        self._main.switch()
        self.alive()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], before: float) -> None:
        """Runs until something is so.

        Raises:
            Stuck: if it never will be, or takes too long.
        """
        while True:
            self._bury()
            if until():
                return
            if self._ready:
                at = self.random.randrange(len(self._ready))
                self._ready[at], self._ready[-1] = self._ready[-1], self._ready[at]
                self._resume(self._ready.pop())
            elif self._timers:
                when, _, task, ticket = heapq.heappop(self._timers)
                if task.done or not task.blocked or task.ticket != ticket:
                    continue
                if when > before:
                    raise Stuck(f"it is not over after {when - 1000:.0f} s")
                self.now = max(self.now, when)
                task.late = True
                self.wake(task)
            else:
                raise Stuck("everybody waits for somebody else")
            if self.turns > MOST_TURNS:
                raise Stuck(f"it is not over after {self.turns} turns")

    def _bury(self) -> None:
        while self._dying:
            task = self._dying.pop()
            if task.done or not task.greenlet:  # it has ended, or never began
                task.done = True
            else:
                self.current = task
                task.greenlet.throw(Killed)
                self.current = None
                if not task.done:
                    raise Stuck(f"{task.name} goes on after its death")
            if task in self._ready:
                self._ready.remove(task)

    def _resume(self, task: Task) -> None:
        if task.done:
            return
        self.turns += 1
        self.current = task
        task.blocked = False
        task.greenlet.switch()
        self.current = None
        if task.done:
            if task in task.process.tasks:
                task.process.tasks.remove(task)
            if task.error is not None:
                self.failed.append((task, task.error))
