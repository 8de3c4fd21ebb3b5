"""A lock for threads that take it again and again, such as those that share a `Batch`."""

from __future__ import annotations

from threading import Lock, get_ident


class FairLock:
    """A reentrant lock that a thread which waits gets before the one that released it.

    A plain lock goes back to a thread that releases it and takes it again at once, as a loop does: others wait until the loop ends. Here
    the first of those that wait holds `_next`, where the loop queues behind it.

    Example:
        with FairLock() as lock, lock:
            pass
    """

    def __init__(self) -> None:
        self._next, self._lock = Lock(), Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> FairLock:
        """Wait for the lock, unless this thread has it."""
        if self._owner != get_ident():
            with self._next:
                self._lock.acquire()
            self._owner = get_ident()
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock with the last of the blocks that this thread is in."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.release()
