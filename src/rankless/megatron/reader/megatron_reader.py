"""A reader of checkpoints of Megatron-LM: whole tensors of each layer, whatever ranks wrote them.

``formats/registry.py`` names it: each rank of a load or conversion opens one. A conversion to Megatron reads its output
back with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankless.errors import CorruptCheckpointError, FormatError, InvalidArgumentError, RanklessError
from rankless.formats.chunked_tensor_slices import JoinedTensor
from rankless.formats.read_stored_tensor import digest_tensor
from rankless.formats.registry import LAYOUT, MEGATRON, MEGATRON_HF
from rankless.formats.stored_tensor import StoredTensor
from rankless.formats.tree.tree_contents import TreeContents, from_components
from rankless.formats.tree.tree_reader import TreeReader
from rankless.megatron.reader import megatron_directory
from rankless.megatron.reader.config_files import read_train_state
from rankless.megatron.reader.content_proof import check_masters
from rankless.megatron.reader.fsdp_dtensor import read_fsdp_dtensor
from rankless.megatron.reader.group_settings import STEP, assign_groups, make_step, merge_groups
from rankless.megatron.reader.hf_families import choose_family
from rankless.megatron.reader.hf_pieces import TransformersPiece
from rankless.megatron.reader.legacy_torch import read_rank_folders
from rankless.megatron.reader.saved_state import MASTER, SavedState
from rankless.megatron.reader.torch_dist import read_torch_dist
from rankless.megatron.reader.transformers_layout import plan_pieces, tied_name

#: The keys that a reader of this format accepts, and the values of three of them; the first is the default.
WEIGHTS, OPTIMIZER, VOCAB = "weights", "optimizer", "vocab_size"
_MODEL = "model"
_READ, _SKIP = "read", "skip"
_CHOICES = {LAYOUT: (MEGATRON, MEGATRON_HF), WEIGHTS: (MASTER, _MODEL), OPTIMIZER: (_READ, _SKIP)}

#: The back end of folders of ``torch.distributed.checkpoint``.
_TORCH_DIST = "torch_dist"


class MegatronReader(TreeReader):
    """One iteration of Megatron, or the newest one of a run.

    ``keys``: ``layout`` is ``megatron`` (the default) for Megatron's names, or ``hf`` for transformers' names, with the
    tensors divided as transformers has them. ``weights`` says which tensors the model gets: ``master`` (the default),
    the optimizer's master weights if there are any, or ``model``, the weights that the model computed with.
    ``optimizer``: ``read`` (the default) or ``skip`` its states. ``vocab_size`` is the number of rows of the embedding
    without padding, if ``args`` have none.
    """

    def __init__(self, path: Path, keys: Mapping[str, str]) -> None:
        _check_keys(keys)
        iteration = megatron_directory.resolve_iteration(path)
        try:
            self._state = _read_state(iteration, with_optimizer=keys.get(OPTIMIZER, _READ) == _READ)
            train_state, files = read_train_state(iteration, self._state.budget)
            self._state.values |= train_state
            contents = _build_contents(self._state, keys)
        except RanklessError:
            raise
        except (AttributeError, LookupError, TypeError) as error:
            raise CorruptCheckpointError(f"{iteration} has files that Megatron does not write: {error}") from error
        self._layout = keys.get(LAYOUT, MEGATRON)
        super().__init__(iteration, MEGATRON, [*self._state.files, *files], self._state.fingerprint, contents)

    def check_files(self) -> None:
        """Check that copies on ranks are equal, and that masters which were found by content match all weights."""
        _check_copies(self._state.copies, str(self.path))
        check_masters(self._state.proofs, str(self.path))

    def describe_family(self) -> str:
        """See :class:`rankless.formats.reader.FamilyReader`."""
        args = self._state.args
        try:
            family = choose_family(args).name
            plan_pieces(self._state.weights, args, None)
        except FormatError as error:
            return f"unknown, so there are Megatron's names only: {error}"
        source = "args" if args.source == str(self._state.path) else Path(args.source).name
        is_hf = self._layout == MEGATRON_HF
        names = "the names are those of transformers" if is_hf else "--layout hf gives the names of transformers"
        return f"{family}, by {source}; {names}"


def _check_keys(keys: Mapping[str, str]) -> None:
    for key, value in keys.items():
        if key not in {VOCAB, *_CHOICES}:
            valid = ", ".join((*_CHOICES, VOCAB))
            raise InvalidArgumentError(f"keys: Megatron's checkpoints have the keys {valid}; got {key!r}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise InvalidArgumentError(f"keys: {key} must be one of {', '.join(_CHOICES[key])}; got {value!r}")
        if key == VOCAB and not (value.isascii() and value.isdigit() and int(value[:12]) > 0 and len(value) <= 12):  # noqa: PLR2004 - digits
            raise InvalidArgumentError(f"keys: {key} must be a positive number; got {value!r}")


def _read_state(iteration: Path, *, with_optimizer: bool) -> SavedState:
    backend = megatron_directory.read_backend(iteration)
    if megatron_directory.has_broken_description(iteration):
        raise CorruptCheckpointError(
            f"{iteration / megatron_directory.DESCRIPTION} names no format: it is corrupt, or not Megatron's"
        )
    if backend is None and megatron_directory.is_fsdp_dtensor(iteration):
        return read_fsdp_dtensor(iteration, with_optimizer=with_optimizer)
    if backend is None:
        return read_rank_folders(iteration, with_optimizer=with_optimizer)
    if backend != _TORCH_DIST:
        raise FormatError(
            f"{iteration} has tensors in the format {backend!r:.40}, and rankless reads {_TORCH_DIST} and torch: "
            "convert it with the version of Megatron that wrote it"
        )
    megatron_directory.check_versions(iteration)
    return read_torch_dist(iteration, with_optimizer=with_optimizer)


def _build_contents(state: SavedState, keys: Mapping[str, str]) -> TreeContents:
    """Return the model, the optimizer and the values in the layout that the keys ask for."""
    masters = {name: states[MASTER] for name, states in state.states.items() if MASTER in states}
    weights = {**state.weights, **masters} if keys.get(WEIGHTS, MASTER) == MASTER else state.weights
    pieces: Mapping[str, tuple[TransformersPiece, ...]] = {
        name: (TransformersPiece(name, name),) for name in state.weights
    }
    tied = None
    if keys.get(LAYOUT, MEGATRON) == MEGATRON_HF:
        pieces = plan_pieces(state.weights, state.args, int(keys[VOCAB]) if VOCAB in keys else None)
        tied = tied_name(pieces, state.args)
    elif VOCAB in keys:
        raise InvalidArgumentError(f"keys: {VOCAB} is for {LAYOUT}={MEGATRON_HF}, which cuts the padding: leave it out")

    def cut(name: str, stored: JoinedTensor) -> dict[str, JoinedTensor]:
        return {piece.target: piece.cut_from(stored, state.args.source) for piece in pieces[name]}

    model = {target: tensor for name, weight in weights.items() for target, tensor in cut(name, weight).items()}
    if tied is not None:
        model[tied[0]] = model[tied[1]]
    components: dict[str, Any] = {"model": model}
    if state.groups and state.states:
        components["optimizer"] = _build_optimizer(state, cut)
    return from_components(components, {"user_content": state.values}, state.budget, str(state.path))


def _build_optimizer(
    state: SavedState, cut: Callable[[str, JoinedTensor], Mapping[str, JoinedTensor]]
) -> dict[str, Any]:
    """Return the state dict of the optimizer, with its parameters by name."""
    trained = {name: state.weights[name] for name in state.weights if name in state.states}
    if state.group_numbers:
        groups, numbers = state.groups[0], state.group_numbers
    else:
        groups = merge_groups(state.groups, str(state.path))
        numbers = assign_groups(trained, groups, state.args)
    steps = [_step_of(group, state) for group in groups]
    states: dict[str, dict[str, StoredTensor]] = {}
    param_groups: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key != STEP}, "params": []} for group in groups
    ]
    for name in trained:
        group, step = param_groups[numbers[name]], steps[numbers[name]]
        if name in state.steps:
            step = make_step(state.steps[name], str(state.path))
        for target in cut(name, state.weights[name]):
            group["params"].append(target)
            states[target] = {} if step is None else {STEP: step}
        for state_name, stored in state.states[name].items():
            for target, tensor in cut(name, stored).items() if state_name != MASTER else ():
                states[target][state_name] = tensor
    return {"state": states, "param_groups": [group for group in param_groups if group["params"]]}


def _step_of(group: Mapping[str, Any], state: SavedState) -> StoredTensor | None:
    value = group.get(STEP, state.common_step)
    return None if value is None else make_step(value, str(state.path))


def _check_copies(copies: Sequence[tuple[str, Sequence[StoredTensor]]], source: str) -> None:
    """Raise ``CorruptCheckpointError`` naming the first tensor that ranks have different copies of."""
    for name, tensors in copies:
        first = digest_tensor(tensors[0])
        if any(digest_tensor(other) != first for other in tensors[1:]):
            raise CorruptCheckpointError(
                f"{source}: {name!r} differs between tensor-parallel ranks, which must have equal copies: the files "
                "are from two saves, or one is corrupt; if the ranks have drifted apart, verify=False loads the "
                "first rank's"
            )
