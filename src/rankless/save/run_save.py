"""Run one save: in the thread of the caller to its end, or from the staged copies on in a thread of its own.

:class:`~rankless.run_directory.RunDirectory`, saves of one component, publishers of weights and offline drains call
:func:`run_save` inside a :meth:`~rankless.save.background.BackgroundSaves.path_turn`, on each rank in the thread of the
caller. The steps hold votes, so all ranks must run their saves in the same order. The thread that this starts is in the
list of :data:`~rankless.save.background.background_saves` until the save has ended, and longer if it has failed.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from rankless.engine.comm.process_group_argument import ProcessGroupArgument, current_process_group
from rankless.engine.io.staging_memory import Arena
from rankless.observe.spans import span
from rankless.process.gc_pause import gc_paused
from rankless.process.worker_threads import lower_priority
from rankless.save.background import SaveInFlight, background_saves
from rankless.save.handle import Result, SaveHandle
from rankless.save.save_operation import Content, SaveOperation

#: A thread must begin to run within so many seconds.
_START_SECONDS = 5.0


def run_save(
    content: Content[Result], scope: Path, process_group: ProcessGroupArgument, *, asynchronous: bool
) -> SaveHandle[Result]:
    """Save a content inside a turn of ``scope``. If ``asynchronous``, return when its tensors are staged.

    On an error nothing is left, on any rank, and staged memory is released after the rollback.
    """
    save, arena = SaveOperation(content), background_saves.open_arena()
    interrupt: BaseException | None = None
    try:
        with gc_paused(), save.rollback_on_error():
            save.prepare()
            # After the main thread has ended, nothing waits for other threads.
            if not asynchronous or not threading.main_thread().is_alive():
                info = save.finish()
                save.leave_session()
                done: Future[Result] = Future()
                done.set_result(info)
                return SaveHandle(content.path, content.mark_returned(), done)
            save.stage(arena)
            handle, interrupt = _start_thread(save, arena, scope, process_group)
    except BaseException:
        arena.release()  # after the rollback: until then, a device may write into it
        raise
    if interrupt is not None:
        raise interrupt
    return handle


def _start_thread(
    save: SaveOperation[Result], arena: Arena, scope: Path, process_group: ProcessGroupArgument
) -> tuple[SaveHandle[Result], BaseException | None]:
    """Start the thread that saves. Return the handle and the exception that interrupted this thread, if any.

    If this thread was interrupted after the other one has started, the save continues.
    """
    content, share = save.content, save.content.share
    background_saves.let_steps_wait(share.copied, share.order_steps)
    turn: Future[None] = Future()
    done: Future[Result] = Future()
    handle = SaveHandle(content.path, content.mark_returned(), done, content.completed_locally)
    group = current_process_group(process_group)
    flight = SaveInFlight(scope, None if group is None else weakref.ref(group), handle, turn, done)
    # Not a daemon thread: the process waits for it. Its priority is lowered after the copies that steps wait for.
    name = f"rankless {content.path.name}"
    handle.thread = threading.Thread(target=_run_in_background, args=(flight, save, arena), name=name)
    background_saves.add(flight)
    try:
        with span("start the thread", "wait"):
            handle.thread.start()
    except BaseException as error:
        if not isinstance(error, RuntimeError) and flight.has_started.wait(_START_SECONDS):
            return handle, error
        background_saves.remove(flight)
        flight.end_recording()
        raise
    return handle, None


def _run_in_background(flight: SaveInFlight, save: SaveOperation[Any], arena: Arena) -> None:
    """Complete a save. It is all that the thread of the save does."""
    flight.has_started.set()
    try:
        _finish_save(flight, save, arena)
    finally:
        flight.end_recording()


def _finish_save(flight: SaveInFlight, save: SaveOperation[Any], arena: Arena) -> None:
    content = save.content
    try:
        with span("save in the background", "call", content.path.name), save.rollback_on_error():
            save.complete_copies()
            lower_priority()
            info = save.finish(partial(flight.turn.set_result, None))
    except BaseException as error:  # noqa: BLE001 - raised by wait(), after the next save has begun, or by finalize()
        content.share.forget_staged()
        arena.release()
        cleared = _clear_frames(error)
        if content.completed_locally is not None and not content.completed_locally.done():
            content.completed_locally.set_exception(cleared)
        flight.done.set_exception(cleared)
        _end_turn(flight)
    else:
        content.share.forget_staged()
        arena.release()
        flight.done.set_result(info)
        _end_turn(flight)
        save.leave_session()
        background_saves.remove(flight)


def _end_turn(flight: SaveInFlight) -> None:
    if not flight.turn.done():
        flight.turn.set_result(None)


def _clear_frames(error: BaseException) -> BaseException:
    """Replace the tracebacks of an error by a note, because their frames would keep the saved tensors alive."""
    error.add_note("In the thread that saved:\n" + "".join(traceback.format_exception(error)))
    chain = [error]
    for link in chain:
        link.__traceback__ = None
        chain += [other for other in (link.__cause__, link.__context__) if other is not None and other not in chain]
    return error
