"""A lock for threads that take it again and again, such as those that share a `Batch`."""

from __future__ import annotations

from _thread import RLock
from threading import Lock


class FairLock(RLock):  # type: ignore[misc]  # final for type checkers only
    """A reentrant lock that a thread which waits gets before the one that released it.

    A plain lock goes back to a thread that releases it and takes it again at once, as a loop does: others wait until the loop ends. Here
    the first of those that wait holds `_next`, where the loop queues behind it.

    Ctrl-C raises KeyboardInterrupt after any call, also within a method that is written in Python. So `__exit__` is that of RLock, which is
    not interrupted, and `__enter__` notes in the same call whether it acquired the lock.

    Example:
        with FairLock() as lock, lock:
            pass
    """

    def __init__(self) -> None:
        self._next = Lock()

    def __enter__(self) -> FairLock:  # type: ignore[override]
        """Wait for the lock, unless this thread has it."""
        # `extend` acquires the lock and notes it in one call into C: KeyboardInterrupt between the two would leave the lock locked.
        acquired: list[bool] = []
        try:
            if self._is_owned():  # type: ignore[attr-defined]  # not documented, but what threading.Condition asks a lock
                acquired.extend(map(self.acquire, (True,)))
            else:
                with self._next:
                    acquired.extend(map(self.acquire, (True,)))
            return self
        except BaseException:
            if acquired:
                self.release()
            raise
