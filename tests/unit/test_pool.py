"""Tests of the pool of ranks that the other tests use: no task sees what an earlier one has changed."""

import gc

import torch

from tests.helpers.pool import Ranks


def use_four_threads() -> None:
    torch.set_num_threads(4)


def test_a_task_has_one_thread_whatever_an_earlier_one_has_set(ranks: Ranks) -> None:
    ranks(1, use_four_threads)
    assert ranks(1, torch.get_num_threads) == [1]


def test_the_garbage_collector_runs_in_a_task_though_not_while_modules_are_preloaded(ranks: Ranks) -> None:
    assert ranks(1, gc.isenabled) == [True]
