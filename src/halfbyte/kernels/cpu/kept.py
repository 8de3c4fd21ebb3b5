"""What a thread keeps between calls, so that a call that was made before need not be planned again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST = 1024


class Kept(threading.local, Generic[T]):
    """Each Python thread has its own plans, since calls may run side by side."""

    def __init__(self) -> None:
        self.plans: dict[Hashable, T] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The plan for `key`, made where there is none yet."""
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) >= _MOST:
                self.plans.clear()
            plan = self.plans[key] = make()
        return plan
