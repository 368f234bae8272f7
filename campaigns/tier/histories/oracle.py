"""What an incarnation must load, as it follows from the notes of those before: independent of the code of rankless.

States form a tree: each follows from the state of the step before or, at the first step of an incarnation, from the one
that this had loaded. What is loaded must be

- one state that a rank began to save, in all elements and on all ranks (no mixture);
- no state of a branch that a later incarnation left when it loaded an older state (the newest claim); but if that one
  has completed nothing, the run directory may have got a newer state just when it loaded;
- at least as new as each state that a rank was told to be complete, if it is still somewhere: durable; or on hosts that
  all are there; or copied, with no more hosts lost than copies survive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from campaigns.common.state import ViolationError
from campaigns.tier.histories.notes import Note, State
from campaigns.tier.histories.plan import Incarnation


@dataclass
class Known:
    """What is known of an incarnation. ``required``: what it had to find when it started."""

    plan: Incarnation
    required: frozenset[State] = frozenset()
    notes: Sequence[Note] = ()

    def states(self, *kinds: str) -> set[State]:
        """Return the states with notes of these kinds."""
        return {note.state for note in self.notes if note.kind in kinds and note.state is not None}

    @property
    def loads(self) -> list[Note]:
        """The notes of ranks that have loaded."""
        return [note for note in self.notes if note.kind == "loaded"]

    @property
    def has_loaded(self) -> bool:
        """True if the load certainly ended well."""
        return bool(self.loads)

    @property
    def loaded(self) -> State | None:
        """The state that was loaded; ``None`` if there was none, or if it is not known."""
        return self.loads[0].state if self.loads else None

    @property
    def copied(self) -> set[State]:
        """The states whose copies are certainly made: rank 0 would warn otherwise."""
        failed = {
            note.text.partition(" has no copies")[0].rpartition("/")[2]
            for note in self.notes
            if note.kind == "warning" and " has no copies" in note.text
        }
        told = {note.state for note in self.notes if note.rank == 0 and note.kind == "copied" and note.state}
        return {state for state in told if state.tag not in failed}


@dataclass
class Oracle:
    """The incarnations so far, in the order in which they started."""

    history: list[Known] = field(default_factory=list)

    def require(self, plan: Incarnation) -> frozenset[State]:
        """Return the states that an incarnation must load, or newer ones, given all notes so far."""
        return frozenset(
            state for state, survives in self._list_told(plan) if survives and not self._may_be_left(state)
        )

    def check_load(self, known: Known) -> None:
        """Raise ``ViolationError`` if an incarnation has loaded what it must not."""
        if wrong := [note for note in known.notes if note.kind == "wrong"]:
            raise ViolationError(f"loaded a mixture: {wrong}")
        loads = known.loads
        if not loads:
            return
        if len({note.state for note in loads}) > 1:
            raise ViolationError(f"ranks have loaded different states: {loads}")
        state = known.loaded
        if state is not None and state not in self._at(state).states("save"):
            raise ViolationError(f"loaded {state}, which nobody has saved")
        self._check_branch(state, known)
        if lost := [wanted for wanted in known.required if not self._leads_to(wanted, state)]:
            raise ViolationError(f"loaded {state} from the {loads[0].text}, and not {max(lost)}, which is complete")

    def _check_branch(self, state: State | None, known: Known) -> None:
        if state is None:
            return
        for later in self.history[state.incarnation + 1 : known.plan.number]:
            is_durable = known.loads[0].text == "run directory"
            has_begun = later.has_loaded and later.loaded is not None and not is_durable
            has_claimed = has_begun or bool(later.states("local"))
            # One that has found nothing on its hosts has begun another run, and left no branch.
            if has_claimed and later.loaded is not None and not self._leads_to(state, later.loaded):
                raise ViolationError(
                    f"loaded {state} of a branch that incarnation {later.plan.number} left when it loaded "
                    f"{later.loaded}"
                )

    def _at(self, state: State) -> Known:
        return self.history[state.incarnation]

    def _leads_to(self, older: State, newer: State | None) -> bool:
        """Return whether a state is another one, or an ancestor of it."""
        while newer is not None:
            if older.incarnation == newer.incarnation:
                return older.step <= newer.step
            newer = self._at(newer).loaded
        return False

    def _may_be_left(self, state: State) -> bool:
        """Return whether a later incarnation has, or may have, continued from an older state."""
        for later in self.history[state.incarnation + 1 :]:
            if later.has_loaded:
                if not self._leads_to(state, later.loaded):
                    return True
            elif state not in later.required:
                return True
        return False

    def _list_told(self, plan: Incarnation) -> Iterator[tuple[State, bool]]:
        """Yield states that ranks were told to be complete, with whether they are still somewhere for certain."""
        for known in self.history:
            number = known.plan.number
            for state in known.states("durable"):
                yield state, True
            for state in known.states("local", "copied"):
                budget = known.plan.survivable if state in known.copied else 0
                yield state, self._survives(state, number, budget, plan)
            if known.loaded is not None:
                is_durable = known.loads[0].text == "run directory"
                yield known.loaded, is_durable or self._survives(known.loaded, number, 0, plan)

    def _survives(self, state: State, number: int, budget: int, plan: Incarnation) -> bool:
        """Return whether the hosts of incarnation ``number``, less ``budget`` of them, have a state for certain."""
        if self._count_lost(self.history[number], plan) > budget:
            return False
        for later in self.history[number + 1 :]:
            lost = self._count_lost(later, plan)
            if not later.has_loaded:
                # It may have loaded a newer state, and removed this one.
                if lost or state not in later.required:
                    return False
            elif later.loaded != state:
                return False  # then that one counts
            elif later.states("save") and lost > later.plan.survivable:
                return False
        return True

    def _count_lost(self, known: Known, plan: Incarnation) -> int:
        """Return how many hosts of an incarnation were lost since, or are not those of a rank of the next one."""
        lost = {host for later in self.history[known.plan.number :] for host in later.plan.incident.lost}
        return len({host for host in known.plan.hosts if host in lost or host not in plan.hosts})
