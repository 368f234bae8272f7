"""Calls that may never come back, made by a thread of their own: who asked waits for them as long as it wants to."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_Todo = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Aside:
    """Makes calls one after another. Its thread ends with it, and keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._todo: _Todo = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        threading.Thread(target=_serve, args=(self._todo,), name=name, daemon=True).start()
        #: Make no more calls.
        self.close = weakref.finalize(self, self._todo.put, None)

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Have a call made when those before it are back."""
        done: Future[T] = Future()
        self._todo.put((done, call))
        return done

    def ask(self, seconds: float, call: Callable[[], T]) -> T:
        """What a call gives. Raises ``TimeoutError`` where it is not back by then; and at once, until it is."""
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier call is not back yet")
        done = self.begin(call)
        try:
            return done.result(seconds)
        except TimeoutError:
            if done.done():
                return done.result()
            self._late = done
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None


def _serve(todo: _Todo) -> None:
    while (item := todo.get()) is not None:
        _make(*item)
        del item  # what a call holds is not held until the next one


def _make(done: Future[Any], call: Callable[[], Any]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        done.set_exception(error)
