"""What comes next, made in the background: one thread reads ahead into a bounded queue.

In: any iterator. Out: the same items in the same order; the iterator's own work runs in the thread. numpy and torch
release the interpreter's lock in their loops, so it runs beside the consumer's work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


class _End:
    """The last entry of the queue: the source is exhausted, or raised `error`."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetched(Generic[T]):
    """An iterator whose items are made ahead by one background thread.

    Use it as a context manager: leaving it stops the thread, wherever the consumer is, and closes the source.

    Args:
        source: Makes the items. It is iterated in the thread and nowhere else.
        depth: Finished items that may wait; with the one in the making, so many more than the consumer holds exist.

    Raises:
        ValueError: depth is below 1.
    """

    def __init__(self, source: Iterable[T], *, depth: int = 2) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self._queue: SimpleQueue[T | _End] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopped = False
        self._finished = False
        self._thread = threading.Thread(target=self._fill, args=(iter(source),), name="daybreak-prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item, waiting for it; an error of the source is raised at its place in the order."""
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _End):
            self._finished = True
            self._thread.join()
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._room.release()
        return item

    def close(self) -> None:
        """Stop the thread and wait for its end: at most as long as the item in the making takes."""
        self._stopped = self._finished = True
        self._room.release()
        self._thread.join()

    def _fill(self, source: Iterator[T]) -> None:
        error: BaseException | None = None
        try:
            while True:
                self._room.acquire()
                if self._stopped:
                    break
                self._queue.put(next(source))
        except StopIteration:
            pass
        except BaseException as raised:  # noqa: BLE001 -- whatever it is belongs to the consumer
            error = raised
        finally:
            close: Any = getattr(source, "close", None)
            if close is not None:
                close()
            self._queue.put(_End(error))
