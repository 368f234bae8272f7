"""The output of ``rankless show --for ENGINE``: the reads of each rank of an inference engine.

:mod:`rankless.cli.show.show_command` calls it, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from rankless.cli.output import print_json
from rankless.cli.table import Cell, Column, Table
from rankless.errors import FormatError, InvalidArgumentError
from rankless.formats.native import MODEL
from rankless.formats.reader import Reader
from rankless.inference.engine_layout import EngineLayout
from rankless.inference.planned_reads import PlannedLoad, RankReads, plan_reads
from rankless.observe.terminal import escape_control_characters, terminal_console
from rankless.observe.units import format_count, format_size

#: The module of each engine, which is above this one and imported by its name.
_ENGINES = {"vllm": "rankless.vllm.lone_rank"}


def print_engine_reads(reader: Reader, engine: str, layout: EngineLayout, config: str, *, as_json: bool) -> None:
    """Print the bytes that each rank would read of a model.

    ``config`` is the folder with the engine's ``config.json``. Raises ``InvalidArgumentError`` or ``FormatError``.
    """
    if MODEL not in reader.groups:
        raise FormatError(f"{reader.path} has no model")
    module = _import_engine(engine)
    planned = plan_reads(reader, layout.size, partial(module.load_on_rank, config, layout))
    if as_json:
        print_json(_json_record(reader, module.ENGINE, layout, planned))
    else:
        _print_table(reader, module.ENGINE, layout, planned)


def _import_engine(engine: str) -> Any:
    if engine not in _ENGINES:
        raise InvalidArgumentError(f"--for {engine}: the engine must be {' or '.join(_ENGINES)}")
    try:
        return import_module(_ENGINES[engine])
    except ModuleNotFoundError as error:
        if error.name != engine:
            raise
        raise InvalidArgumentError(
            f"--for {engine}: {engine} is not installed here, and its own code decides what a rank needs: install "
            f"rankless and {engine} into one environment"
        ) from None


def _print_table(reader: Reader, engine: str, layout: EngineLayout, planned: PlannedLoad) -> None:
    infos = reader.groups[MODEL].values()
    out = terminal_console()
    stored = f"{format_count(len(infos), 'tensor')}, {format_size(sum(info.nbytes for info in infos))}"
    out.print(escape_control_characters(f"{reader.path}: {stored}, for {engine} with {layout}"))
    out.print()
    titles = ("rank", "parameters", "needed", "alone", "shared", "from a store")
    rows = [[str(rank), *_format_reads(reads)] for rank, reads in enumerate(planned.ranks)]
    total = [sum(column) for column in zip(*map(_sizes, planned.ranks), strict=True)]
    out.print(Table([Column(title, right=True) for title in titles], [*rows, _bold(["all", *map(format_size, total)])]))
    out.print()
    out.print(
        f"From a disk, if all ranks are on one host: {format_size(planned.from_disk)}; what is shared is read once."
    )
    if computed := {name: why for reads in planned.ranks for name, why in reads.computed.items()}:
        name, operation = next(iter(computed.items()))
        what = f"{format_count(len(computed), 'tensor')}, such as {name} ({operation})"
        out.print(escape_control_characters(f"Computed with instead of copied: {what}"))


def _sizes(reads: RankReads) -> tuple[int, ...]:
    return reads.parameters, reads.needed, reads.alone, reads.shared, reads.from_store


def _format_reads(reads: RankReads) -> list[str]:
    return [format_size(size) for size in _sizes(reads)]


def _bold(texts: Sequence[str]) -> list[Cell]:
    return [(text, "bold") for text in texts]


def _json_record(reader: Reader, engine: str, layout: EngineLayout, planned: PlannedLoad) -> dict[str, object]:
    return {
        "path": str(reader.path),
        "engine": engine,
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "expert_parallel": layout.has_expert_parallelism,
        "bytes": sum(info.nbytes for info in reader.groups[MODEL].values()),
        "from_disk": planned.from_disk,
        "ranks": [
            {
                "parameters": reads.parameters,
                "needed": reads.needed,
                "alone": reads.alone,
                "shared": reads.shared,
                "from_store": reads.from_store,
                "computed": reads.computed,
            }
            for reads in planned.ranks
        ],
    }
