"""``edit``: changes a checkpoint with its optimizer states, and writes the result as a stream."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

from rankless.conversion.carried_values import carry_values
from rankless.conversion.pipeline import Conversion, ConversionRequest, check_format
from rankless.conversion.tensor_filter import TensorFilter
from rankless.edits.apply_edits import EditReport, ReaderEdit, edit_reader
from rankless.edits.recipe import Edit, parse_recipe
from rankless.engine.comm.collective_call import collective_call
from rankless.engine.comm.process_group_argument import ProcessGroupArgument
from rankless.engine.comm.session import RankGroup, WritingRanks
from rankless.errors import InvalidArgumentError
from rankless.formats.registry import LAYOUT, NOT_FOR_EDITS
from rankless.observe.events import OnEvent, ignore_event
from rankless.ondisk.data_files import NO_ADAPTERS, SHARD_SIZE, WITH_ADAPTERS, parse_size
from rankless.ondisk.validation import check_integer, check_keys
from rankless.run.lookup import open_latest
from rankless.storage.location import parse_location
from rankless.torch_import import explain_imports

#: The formats that have the model alone.
_MODEL_ONLY = frozenset({"hf", "safetensors"})


def edit(
    path: str | PathLike[str],
    output: str | PathLike[str],
    edits: Edit,
    *,
    to: str = "native",
    model_only: bool = False,
    keys: Mapping[str, str] | None = None,
    layout: str | PathLike[str] | None = None,
    step: int | None = None,
    max_shard_size: int | str = SHARD_SIZE,
    verify: bool = True,
    on_event: OnEvent | None = None,
    process_group: ProcessGroupArgument = None,
    timeout: float = 600.0,
) -> Path:
    """Write a changed copy of a checkpoint: weights, masters, moments, parameter groups, schedulers, configuration.

    ```python
    rankless.edit("run/step_500", "grown/step_500", ["resize-vocab 50304", "freeze include=layers.0.*"])
    ```

    All verbs take effect in one pass, which needs a few buffers of memory, whatever the size. Every rank of the process
    group calls it, and the ranks share the work. ``output`` appears in one step, when it is complete and verified. A
    file without a changed byte is a hard link of the source's file, if the file system has links and the format of both
    is native: both become read-only, and either checkpoint can be removed. Pass the ``max_shard_size`` of the source,
    so that files can be equal.

    :class:`rankless.LoadOptions` has the same edits for loads, without a file in between.

    Args:
        path: a checkpoint of any format that rankless reads, or a run's folder for its latest checkpoint.
        output: the output path; must not exist.
        edits: verbs in order, each as text such as ``"layers drop=4-7"`` or as a table ``{"verb": "layers", "drop":
            [4, 5, 6, 7]}``, or the path of a recipe, which is a TOML file with such tables ``[[edit]]``. The verbs are
            ``average``, ``cast``, ``dequantise``, ``freeze``, ``layers``, ``rename``, ``resize-vocab``, ``unfreeze``
            and ``upcycle``.
        to: the format of the output, as in :func:`rankless.convert`, but not ``"nxd"`` or ``"peft"``.
        model_only: write only the model.
        keys: as in :func:`rankless.convert`.
        layout: as in :func:`rankless.convert`, for a source of NxD or Megatron.
        step: the training step of the output, if it is another one than the source's step.
        max_shard_size: the maximum bytes of tensors in one file, for formats with several files.
        verify: read the output back, and the files that it shares with the source. All other bytes of the source are
            verified in any case if its format has checksums.
        on_event: is called with the progress: see :class:`rankless.Progress`.
        process_group: the ranks that share the work; ``"self"`` is this process alone.
        timeout: how many seconds ranks wait for each other before all of them fail.

    Returns:
        The path of the output.

    Raises:
        InvalidArgumentError: a verb or an argument is not valid, or does not fit the checkpoint.
        MismatchError: checkpoints to average have other tensors.
        UnsupportedTensorError: a quantized weight has no scale of a known form.
        TagExistsError: ``output`` exists.
        CorruptCheckpointError: the source does not match its checksums, or the output has other bytes than were
            written.
    """
    with collective_call(process_group, timeout):
        check_keys(keys)
        verbs = parse_recipe(edits)
        _check_format(to, step)
        request = ConversionRequest(
            parse_location(path),
            parse_location(output),
            to,
            _make_filter(to, model_only=model_only),
            _with_layout(keys, layout),
            parse_size(max_shard_size),
            step=None if step is None else check_integer("step", step, smallest=0),
            edit=ReaderEdit(verbs, is_repeated=True),
        )
        with explain_imports(f"to={to!r}"):
            ranks = RankGroup(process_group)
            writing = WritingRanks(ranks, ranks.open_session(timeout))
            return Conversion(request, writing, on_event or ignore_event).run(verify=verify)


def explain_edit(
    path: Path,
    edits: Edit,
    *,
    to: str = "native",
    model_only: bool = False,
    keys: Mapping[str, str] | None = None,
    layout: str | PathLike[str] | None = None,
    step: int | None = None,
) -> EditReport:
    """Return the changes that an edit would make. Nothing is written. ``rankless edit --dry-run`` prints it.

    Raises the error of the edit if it is refused: of states that cannot follow, and of values.
    """
    _check_format(to, step)
    reader, report = edit_reader(open_latest(path, _with_layout(keys, layout)), parse_recipe(edits))
    tensor_filter = _make_filter(to, model_only=model_only)
    tensor_filter.select_tensors(reader)
    carry_values(reader, tensor_filter)
    return report


def _check_format(to: str, step: int | None) -> None:
    if to in NOT_FOR_EDITS:
        raise InvalidArgumentError(f"an edit cannot be written as {to!r}: write 'native', and convert that")
    check_format(to, step)


def _make_filter(to: str, *, model_only: bool) -> TensorFilter:
    adapters = WITH_ADAPTERS if to == "native" else NO_ADAPTERS
    return TensorFilter(model_only=model_only or to in _MODEL_ONLY, adapters=adapters)


def _with_layout(keys: Mapping[str, str] | None, layout: str | PathLike[str] | None) -> dict[str, str]:
    return {**(keys or {}), **({LAYOUT: str(layout)} if layout is not None else {})}
