"""The clocks, on a clock that the test turns by hand; and the lock that threads get in turn."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from halfbyte import locks, timing
from halfbyte.errors import ArgumentError
from halfbyte.locks import FairLock
from halfbyte.timing import Timing, interleave, measure, time_text


class Clock:
    """Nanoseconds that pass only when something takes them."""

    def __init__(self) -> None:
        self.now = 0

    def taking(self, *nanoseconds: int) -> Callable[[], None]:
        """A function whose calls take these times, in turn and round again."""
        calls = 0

        def fn() -> None:
            nonlocal calls
            self.now += nanoseconds[calls % len(nanoseconds)]
            calls += 1

        return fn


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter_ns", lambda: clock.now)
    return clock


def test_median_and_ends(clock: Clock) -> None:
    got = measure(clock.taking(1000, 2000, 3000, 50_000, 2500), min_time=0, min_runs=5, warmup=0)
    assert got == Timing(median=2.5e-6, min=1e-6, max=5e-5, runs=5, seconds=5.85e-5)


def test_warmup_is_not_counted(clock: Clock) -> None:
    got = measure(clock.taking(9_000_000, 9_000_000, 10, 10, 10), min_time=0, min_runs=3, warmup=2)
    assert (got.max, got.runs) == (1e-8, 3)


@pytest.mark.parametrize(("each", "runs"), [(300_000_000, 5), (10_000_000, 20), (10_500_000, 20), (100_000_000, 5)])
def test_runs_until_both_bounds_are_met(clock: Clock, each: int, runs: int) -> None:
    got = measure(clock.taking(each), min_time=0.2, min_runs=5)
    assert got.runs == runs
    assert got.seconds == pytest.approx(runs * each / 1e9)


def test_a_real_clock() -> None:
    got = measure(lambda: time.sleep(0.002), min_time=0, min_runs=3)
    assert 0.0015 <= got.min <= got.median <= got.max


def test_interleave_takes_turns_and_goes_back(clock: Clock) -> None:
    order = []

    def contender(name: str, nanoseconds: int) -> Callable[[], None]:
        take = clock.taking(nanoseconds)

        def fn() -> None:
            order.append(name)
            take()

        return fn

    got = interleave({"a": contender("a", 1000), "b": contender("b", 2000), "c": contender("c", 3000)}, rounds=3)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert [(name, t.median, t.runs) for name, t in got.items()] == [("a", 1e-6, 3), ("b", 2e-6, 3), ("c", 3e-6, 3)]


def test_interleave_nobody() -> None:
    assert interleave({}) == {}


@pytest.mark.parametrize("bad", [{"min_runs": 0}, {"warmup": -1}, {"min_time": -1.0}, {"min_time": math.nan}, {"min_time": math.inf}])
def test_bad_measure(bad: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        measure(pytest.fail, **bad)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"warmup": -1}])
def test_bad_interleave(bad: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(bad))):
        interleave({"a": pytest.fail}, **bad)


def test_an_error_inside_comes_out() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure(fail)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (1.234e-7, "0.123 us"),
        (9.999e-6, "10.0 us"),
        (1.2345e-4, "123 us"),
        (9.999e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (1234.0, "1230 s"),
    ],
)
def test_three_digits_of_a_time(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_the_lock_is_reentrant_and_free_at_the_end() -> None:
    lock, entered = FairLock(), threading.Event()
    with lock, lock:
        other = threading.Thread(target=lambda: [lock.__enter__(), entered.set(), lock.__exit__()], daemon=True)
        other.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)
    other.join(10)
    with lock:
        pass


def test_a_lock_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        lock = FairLock()
        with lock, lock:
            freed = weakref.ref(lock)
        del lock
        assert freed() is None
    finally:
        gc.enable()


def test_a_loop_does_not_keep_others_waiting() -> None:
    lock, stop, rounds = FairLock(), threading.Event(), [0]

    def loop() -> None:
        while not stop.is_set():
            with lock:
                rounds[0] += 1
                time.sleep(0.002)  # as native code does, without the interpreter's lock

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    while not rounds[0]:
        time.sleep(0.001)
    waited = []
    for _ in range(10):
        before = rounds[0]
        with lock:
            waited.append(rounds[0] - before)
        time.sleep(0.003)
    stop.set()
    thread.join(10)
    assert max(waited) <= 4  # the turn in progress, and one where this thread was not scheduled; a plain lock: hundreds


def _interrupted(lock: FairLock, at: int) -> bool:
    """Enter two blocks of a lock, with KeyboardInterrupt before line number `at` of its code that is run; return whether there is one."""
    count = last = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count, last
        if frame.f_code.co_filename != locks.__file__:
            return None
        is_end_of_with = event == "line" and frame.f_lineno < last
        last = frame.f_lineno
        if event in ("call", "line") and not is_end_of_with:  # CPython raises none there, nor as a function returns
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with lock, lock:
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _is_free(lock: FairLock) -> bool:
    """Whether another thread gets the lock, and the queue before it."""
    got = list[bool]()
    other = threading.Thread(target=lambda: got.extend([lock._next.acquire(timeout=1), lock.acquire(timeout=1)]))
    other.start()
    other.join()
    return got == [True, True]


def test_the_lock_is_free_after_an_interrupt_in_any_of_its_lines() -> None:
    at = 1
    while _interrupted(lock := FairLock(), at):
        assert _is_free(lock), f"locked after KeyboardInterrupt in line {at}"
        at += 1
    assert at > 12, "the lines of a first and of a second entry"


def test_the_lock_is_free_after_signals_at_any_time() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    lock, interrupts, rounds = FairLock(), 0, 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 400:
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + interrupts % 40 * 1e-6)
                while True:
                    with lock, lock:
                        rounds += 1
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rounds
    assert _is_free(lock)
