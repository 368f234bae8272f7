"""Tests the hook that lets steps wait for copies, if several threads save at a time."""

from __future__ import annotations

import threading
import time
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rankless.state import step_guard
from rankless.state.step_guard import StepGuard


def test_two_threads_that_save_at_a_time_leave_no_hook_behind() -> None:
    guard, registered = StepGuard(), []

    def register(hook: object) -> object:
        time.sleep(0.1)  # the other thread looks meanwhile whether there is a hook
        registered.append(register_optimizer_step_pre_hook(hook))  # type: ignore[arg-type]
        return registered[-1]

    copies = [threading.Event(), threading.Event()]
    with mock.patch.object(step_guard, "register_optimizer_step_pre_hook", register):
        threads = [threading.Thread(target=guard.add_copy, args=(copied,)) for copied in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(registered) == 1
    for copied in copies:
        copied.set()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    optimizer.step()  # it follows both copies
    guard.remove_idle_hook()
    assert guard._hook is None  # type: ignore[attr-defined]
