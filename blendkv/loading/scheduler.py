"""Transfers of all requests of a process from one source share a few slots, and take turns.

A transfer that shares a link with a hundred others is late, and so are the hundred. With a bounded number of slots each
one is quick, and what matters is who is next (`blendkv.loading.queues`): a request that needs two pieces must not wait
behind one that needs a thousand. `blendkv bench fairness` compares the policies.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from blendkv.loading.queues import DEFAULT_POLICY, USUAL_BYTES, Piece, PieceQueue, get_queue

T = TypeVar("T")
SLOTS = 8
LINGER_SECONDS = 1.0


@dataclass(frozen=True)
class SchedulerState:
    """What a scheduler is at.

    Attributes:
        running: pieces under way.
        waiting: pieces that wait for a slot.
        done: pieces that ended, well or not.
        cancelled: pieces that were taken back before they began.
        threads: that it has now.
    """

    running: int
    waiting: int
    done: int
    cancelled: int
    threads: int


class TransferScheduler:
    """Runs pieces of work of many clients in a bounded number of threads. Safe to share among threads.

    A piece runs in the context of whoever submitted it, so a `blendkv.stores.deadline` around `submit` holds for it,
    the time that it waits included. Threads begin with the first piece and end when none came for a second; they keep
    no process alive. A piece must not wait for another one of the same scheduler: all slots might be taken by those who
    wait.

    Args:
        slots: most pieces under way.
        policy: who is next: "drr" (deficit round robin by bytes), "softmax", "fifo", or a queue of your own.
        linger: seconds that a thread without work stays.
    """

    def __init__(
        self, slots: int = SLOTS, policy: str | PieceQueue = DEFAULT_POLICY, *, linger: float = LINGER_SECONDS
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots}: give at least 1")
        self.slots = slots
        self._queue, self._linger = get_queue(policy), linger
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._threads: set[threading.Thread] = set()
        self._waiting: dict[Hashable, set[Piece]] = {}
        self._idle = self._running = self._done = self._cancelled = 0
        self._closed = False

    def submit(
        self, client: Hashable, fn: Callable[..., T], /, *args: Any, cost_bytes: int = USUAL_BYTES, **kwargs: Any
    ) -> Future[T]:
        """Hands in a piece of work.

        Args:
            client: whose it is: a request, a tenant. Pieces of one client begin in the order they were submitted.
            fn: does it; what it returns or raises is in the future.
            *args: of `fn`.
            cost_bytes: about how many bytes it moves; 1 MiB if that is not known.
            **kwargs: of `fn`.

        Returns:
            A future. `cancel` takes the piece back as long as it waits.

        Raises:
            RuntimeError: after `close`.
        """
        future: Future[T] = Future()
        job = partial(contextvars.copy_context().run, fn, *args, **kwargs)
        piece = Piece(client, cost_bytes, (future, job))
        with self._lock:
            if self._closed:
                raise RuntimeError("this scheduler is closed; make another one")
            self._queue.push(piece)
            self._waiting.setdefault(client, set()).add(piece)
            if len(self._queue) > self._idle and len(self._threads) < self.slots:
                self._begin_thread(piece)
            self._work.notify()
        future.add_done_callback(partial(self._taken_back, piece))
        return future

    def cancel(self, client: Hashable) -> int:
        """Takes back all pieces of a client that wait, and says how many; those under way run to their end."""
        with self._lock:
            futures = [piece.item[0] for piece in self._waiting.get(client, ())]
        return sum(future.cancel() for future in futures)

    @property
    def closed(self) -> bool:
        """Whether it takes nothing more."""
        return self._closed

    @property
    def is_free(self) -> bool:
        """Whether no thread is in the middle of a change, not even this one: for finalizers, which must not wait."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return free

    def lane(self, client: Hashable | None = None) -> Lane:
        """A request's own way in, which takes back what still waits when the request is over."""
        return Lane(self, object() if client is None else client)

    @property
    def state(self) -> SchedulerState:
        """What it is at."""
        with self._lock:
            return SchedulerState(self._running, len(self._queue), self._done, self._cancelled, len(self._threads))

    def close(self, timeout: float | None = None) -> bool:
        """Takes back what waits, takes nothing more, and waits for what is under way.

        Args:
            timeout: most seconds to wait; None waits as long as it takes. A thread never waits for itself.

        Returns:
            Whether all threads have ended.
        """
        with self._lock:
            self._closed = True
            futures = [piece.item[0] for waiting in self._waiting.values() for piece in waiting]
            threads = self._threads - {threading.current_thread()}
        for future in futures:
            future.cancel()
        with self._lock:
            self._work.notify_all()
        end = None if timeout is None else time.monotonic() + timeout
        for thread in threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _begin_thread(self, piece: Piece) -> None:
        thread = threading.Thread(target=self._run, name="blendkv-transfer", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # this process can have no more threads: those that there are do it
            self._threads.discard(thread)
            if not self._threads:
                self._queue.remove(piece)
                self._forget(piece)
                raise

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            future, job = taken
            result, error = None, None
            try:
                result = job()
            except BaseException as raised:
                error = raised
            with self._lock:  # before anybody is told: who was told finds it counted
                self._running -= 1
                self._done += 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del taken, future, job, result, error  # a thread that waits keeps nothing alive

    def _next(self) -> tuple[Future, Callable[[], Any]] | None:
        """What runs from now on, or None if this thread should end."""
        with self._lock:
            while True:
                while len(self._queue):
                    future, job = self._forget(self._queue.pop())
                    if future.set_running_or_notify_cancel():
                        self._running += 1
                        return future, job
                    del future, job
                if self._closed:
                    break
                self._idle += 1
                told = self._work.wait(self._linger)
                self._idle -= 1
                if not told and not len(self._queue):
                    break
            self._threads.discard(threading.current_thread())
            return None

    def _forget(self, piece: Piece) -> tuple[Future, Callable[[], Any]]:
        """A piece waits no longer; gives what it holds, which it holds no more: the future has a callback with it."""
        waiting = self._waiting[piece.client]
        waiting.discard(piece)
        if not waiting:
            del self._waiting[piece.client]
        item, piece.item = piece.item, None
        return item

    def _taken_back(self, piece: Piece, future: Future) -> None:
        if not future.cancelled():
            return
        with self._lock:
            item = self._forget(piece) if self._queue.remove(piece) else None
            self._cancelled += 1
        if item is not None:  # else it was just popped, and whoever did tells those who `wait` for it
            future.set_running_or_notify_cancel()
        del item  # not under the lock: whatever that frees may ask for it


class Lane:
    """One request's way through a scheduler; at the end of a `with` block nothing of it is left there.

    Args:
        scheduler: that is shared.
        client: the request.
    """

    def __init__(self, scheduler: TransferScheduler, client: Hashable) -> None:
        self.client = client
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., T], /, *args: Any, cost_bytes: int = USUAL_BYTES, **kwargs: Any) -> Future[T]:
        """Hands in a piece of work (`TransferScheduler.submit`)."""
        future = self._scheduler.submit(self.client, fn, *args, cost_bytes=cost_bytes, **kwargs)
        with self._lock:
            self._futures.add(future)
        future.add_done_callback(self._over)
        return future

    def cancel(self) -> int:
        """Takes back what waits, and says how much; what is under way runs to its end."""
        with self._lock:
            futures = list(self._futures)
        return sum(future.cancel() for future in futures)

    def abandon(self) -> None:
        """`cancel` for finalizers, which run in any thread, between any two steps of it.

        Does nothing where that might wait for this very thread; a piece that nobody wants must find that out when it
        gets its slot.
        """
        if self._scheduler.is_free and self._lock.acquire(blocking=False):
            self._lock.release()
            self.cancel()

    def close(self, timeout: float | None = None) -> bool:
        """Takes back what waits, and waits for what is under way; whether that ended in time."""
        self.cancel()
        with self._lock:
            futures = set(self._futures)
        return not wait(futures, timeout).not_done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _over(self, future: Future) -> None:
        with self._lock:
            self._futures.discard(future)


_SHARED: dict[str, TransferScheduler] = {}
_SHARED_LOCK = threading.Lock()


def shared_scheduler(source: str = "") -> TransferScheduler:
    """The one that all requests of this process share for what comes from one source.

    Sources have slots of their own: one that stalls has all of its slots taken, and whoever wants another one must not
    wait for that. One that somebody closed is no longer shared: prompts that come get another.

    Args:
        source: URL of a store that is not local; "" for all that are.
    """
    with _SHARED_LOCK:
        if source not in _SHARED or _SHARED[source].closed:
            _SHARED[source] = TransferScheduler()
        return _SHARED[source]


def _forked() -> None:
    """A child process has none of its parent's threads: it makes a scheduler of its own."""
    global _SHARED, _SHARED_LOCK
    _SHARED, _SHARED_LOCK = {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
