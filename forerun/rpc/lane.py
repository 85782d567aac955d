"""One thread for all that computes, from loading to the last pass.

Numeric libraries keep helper threads for every thread that has called them, and let them doze once there are more than
cores: a model loaded in one thread and run in another is half as fast on two cores.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """Runs what it is given, in order, in a thread that does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._todo: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def run(self, work: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._todo.put((done, work))
        return done

    def _work(self) -> None:
        while True:
            done, work = self._todo.get()
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)
