"""A lock for threads that take it again and again, such as those that share a `Batch`."""

from __future__ import annotations

from _thread import RLock
from threading import Condition, Lock


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
        self._next, self._condition = Lock(), Condition(self)

    def __enter__(self) -> FairLock:  # type: ignore[override]
        """Wait for the lock, unless this thread has it."""
        acquired: list[bool] = []
        try:
            if self._is_owner():
                acquired.extend(map(self.acquire, (True,)))
            else:
                with self._next:
                    acquired.extend(map(self.acquire, (True,)))  # one call, so that no interrupt comes between its two effects
            return self
        except BaseException:
            if acquired:
                self.release()
            raise

    def _is_owner(self) -> bool:
        """Whether this thread has the lock: what a Condition requires."""
        try:
            self._condition.notify(0)
        except RuntimeError:
            return False
        return True
