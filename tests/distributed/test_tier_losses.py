"""Tests which checkpoint is loaded after hosts are lost, over all that a local tier may hold and all layouts.

The oracle knows what the guide says, and nothing of the code: where copies go, what parity survives, and that copies
which fail leave the generation before.
"""

import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rankless
from campaigns.tier.histories.notes import State
from campaigns.tier.histories.plan import LAYOUTS
from campaigns.tier.histories.training import Training
from rankless.errors import RankFailedError
from rankless.tier.copies_on_hosts import PartCopies
from rankless.tier.host_folder import TierFolder
from rankless.tier.parity import PartParity
from tests.helpers.examples import examples
from tests.helpers.pool import Ranks

NEVER = 10**6

#: How a save ends: with its copies; without them, as a rank failed; without a label; or without the part of a rank.
ENDS = ("copied", "alone", "unlabelled", "partial")


@dataclass(frozen=True)
class Save:
    """One save. ``drained``: it is written into the run directory, too."""

    end: str
    drained: bool


@dataclass(frozen=True)
class Case:
    """A job that saves, hosts that are lost, and a job that loads. ``hosts`` have a letter for each rank."""

    hosts: str
    layout: str
    copies: int
    parity: int
    saves: tuple[Save, ...]
    lost: frozenset[str]
    next_hosts: str
    next_layout: str


HOSTS = st.text("abcd", min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    hosts = draw(HOSTS)
    copies, parity = draw(st.sampled_from([(0, 0), (1, 0), (2, 0), (0, 2), (0, 3)]))
    ends = st.sampled_from(ENDS if copies or parity else ("copied", "unlabelled", "partial"))
    saves = draw(st.lists(st.builds(Save, ends, st.booleans()), min_size=1, max_size=4))
    lost = draw(st.frozensets(st.sampled_from(sorted(set(hosts))), max_size=2))
    same = st.permutations(hosts).map("".join)  # a job on the same hosts finds most of what there is
    layouts = st.sampled_from(LAYOUTS)
    return Case(hosts, draw(layouts), copies, parity, tuple(saves), lost, draw(same | HOSTS), draw(layouts))


def save_all(base: str, case: Case) -> None:
    rank, training = dist.get_rank(), Training(case.layout)
    local = rankless.LocalTier(f"{base}/{case.hosts[rank]}", copies=case.copies, parity=case.parity, drain_every=NEVER)
    directory = rankless.RunDirectory(f"{base}/run", local=local)
    for step, save in enumerate(case.saves, 1):
        training.fill(State(0, step))
        with failing(save.end), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                directory.save(
                    f"step_{step}", training.model, training.optimizer, step=step, rng=False, forced=save.drained
                )
            except RankFailedError:
                assert save.end in {"unlabelled", "partial"}
            else:
                assert save.end in {"copied", "alone"}


def failing(end: str) -> mock._patch:
    """Let a save end in this way."""
    failure = RankFailedError("a rank has failed")
    if end == "unlabelled":
        return mock.patch.object(TierFolder, "write_common", side_effect=failure)
    if end == "partial" and dist.get_rank() == dist.get_world_size() - 1:
        return mock.patch.object(TierFolder, "write_part", side_effect=failure)
    if end == "alone":
        return mock.patch.multiple(
            "rankless.save.tier_stage",
            PartCopies=mock.Mock(spec=PartCopies, side_effect=RankFailedError("a rank has failed")),
            PartParity=mock.Mock(spec=PartParity, side_effect=RankFailedError("a rank has failed")),
        )
    return mock.patch.object(TierFolder, "unused", create=True)


def load(base: str, case: Case) -> tuple[float | None, list[str]]:
    """Return the step that is loaded, and the tensors that are not those of this step."""
    training = Training(case.next_layout)
    local = rankless.LocalTier(f"{base}/{case.next_hosts[dist.get_rank()]}")
    directory = rankless.RunDirectory(f"{base}/run", local=local)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            restored = directory.restore(None, training.model, training.optimizer, rng=False)
        except rankless.NoCheckpointError:
            return None, []
    directory.wait()
    return restored.step, training.find_wrong(State(0, int(restored.step or 0)))


# ---------------------------------------------------------------------------------------------------------------
# The oracle


def expect(case: Case) -> int | None:
    """Return the step that must be loaded: the newest one that is complete somewhere."""
    durable = list_durable(case.saves)
    in_tier = [
        step for step in list_kept(case.saves) if survives(case, has_copies=case.saves[step - 1].end == "copied")
    ]
    return max([*durable, *in_tier], default=None)


def list_durable(saves: tuple[Save, ...]) -> list[int]:
    """Return the steps in the run directory. If a save that is to be drained fails, the next one is."""
    durable, is_due = [], False
    for step, save in enumerate(saves, 1):
        is_due |= save.drained
        if is_due and save.end in {"copied", "alone"}:
            durable.append(step)
            is_due = False
    return durable


def list_kept(saves: tuple[Save, ...]) -> list[int]:
    """Return the steps in the tier: the newest complete one, and the newest with copies."""
    complete = [step for step, save in enumerate(saves, 1) if save.end in {"copied", "alone"}]
    copied = [step for step in complete if saves[step - 1].end == "copied"]
    return sorted({*complete[-1:], *copied[-1:]})


def survives(case: Case, *, has_copies: bool) -> bool:
    """Return whether the hosts of the next job have all parts, or what they can be computed from."""
    order = list(dict.fromkeys(case.hosts))
    there = {host for host in order if host in case.next_hosts and host not in case.lost}
    if has_copies and case.parity:
        return all(is_computable(case, rank, order, there) for rank in range(len(case.hosts)))
    copies = case.copies if has_copies else 0
    holders = [[order[(order.index(host) + step) % len(order)] for step in range(copies + 1)] for host in case.hosts]
    return all(there.intersection(of_part) for of_part in holders)


def is_computable(case: Case, rank: int, order: list[str], there: set[str]) -> bool:
    """Return whether the part of a rank is there, or all other hosts of its group are."""
    if case.hosts[rank] in there:
        return True
    starts = list(range(0, len(order), case.parity))
    if len(starts) > 1 and len(order) - starts[-1] < case.parity:
        del starts[-1]  # the last hosts join the group before them
    group = next(
        order[start:stop]
        for start, stop in zip(starts, [*starts[1:], len(order)], strict=True)
        if case.hosts[rank] in order[start:stop]
    )
    index = case.hosts[:rank].count(case.hosts[rank])
    is_in_group = len(group) > 1 and all(case.hosts.count(host) > index for host in group)
    return is_in_group and all(host in there for host in group if host != case.hosts[rank])


@settings(max_examples=examples(15, least=6))
@given(cases())
def test_the_newest_checkpoint_that_is_complete_somewhere_is_loaded(ranks: Ranks, case: Case) -> None:
    with tempfile.TemporaryDirectory() as base:
        ranks(len(case.hosts), save_all, base, case)
        for host in case.lost:
            shutil.rmtree(Path(base) / host)
        loaded = ranks(len(case.next_hosts), load, base, case)
    assert loaded == [(expect(case), [])] * len(case.next_hosts)
