"""Reading ahead: the same items in the same order, a bounded lead, errors where they belong, no thread left behind."""

import threading
from collections.abc import Iterator

import pytest

from gr_core.data.prefetch import Prefetched


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "daybreak-prefetch"]


def test_items_come_in_the_order_of_the_source() -> None:
    """All items once, in order, then the end again and again; the thread has ended by then."""
    with Prefetched(iter(range(1000)), depth=3) as ahead:
        assert list(ahead) == list(range(1000))
        assert list(ahead) == []
        assert threads() == []


def test_the_work_is_done_in_another_thread() -> None:
    """The source runs beside the consumer."""
    with Prefetched(threading.get_ident() for _ in range(3)) as ahead:
        assert threading.get_ident() not in set(ahead)


def test_the_lead_is_bounded() -> None:
    """With a consumer that stands still, no more than `depth` items are made."""
    made = [threading.Event() for _ in range(5)]

    def source() -> Iterator[int]:
        for number, event in enumerate(made):
            event.set()
            yield number

    with Prefetched(source(), depth=3) as ahead:
        assert made[2].wait(10)
        assert not made[3].wait(0.05)
        assert next(ahead) == 0
        assert made[3].wait(10)
        assert not made[4].wait(0.05)


def test_an_error_surfaces_at_its_place() -> None:
    """What was made before the error is handed out first; then the error itself, then the end."""

    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise RuntimeError("the third is broken")

    with Prefetched(source(), depth=8) as ahead:
        assert [next(ahead), next(ahead)] == [1, 2]
        with pytest.raises(RuntimeError, match="the third is broken"):
            next(ahead)
        assert list(ahead) == []
        assert threads() == []


def test_stopping_early_ends_the_thread_and_closes_the_source() -> None:
    """Leaving the context in the middle, also by an error of the consumer, leaves no thread and runs `finally`."""
    closed: list[bool] = []

    def source() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    def consume(ahead: Prefetched[int]) -> None:
        with ahead:
            raise KeyError(next(ahead))

    ahead = Prefetched(source())
    with pytest.raises(KeyError, match="0"):
        consume(ahead)

    assert closed == [True]
    assert threads() == []
    assert list(ahead) == []


def test_a_depth_below_one_is_refused() -> None:
    """Nothing could ever be handed over."""
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Prefetched([1], depth=0)
