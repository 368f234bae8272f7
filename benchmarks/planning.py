"""Planning a save and a load, as one rank does it, of jobs of many simulated ranks: FSDP2 with AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.measure import Contender, Figure, Table, interleaved
from benchmarks.setting import Setting
from holdfast.engine.comm.spec_exchange import SpecDigests, SpecDirectory, digest_specs
from holdfast.engine.plan.global_spec import GlobalSpec
from holdfast.engine.plan.placements import MeshShape, Sharded
from holdfast.engine.plan.save_plan import plan_save
from holdfast.engine.plan.spec import LayoutSpec, Meshes, Spec, TensorSpec

#: Parameters, each with two moments and a count of steps.
PARAMETERS = 2000

_MOMENTS = ("exp_avg", "exp_avg_sq")

_RANKS = (8, 64, 512, 4096)
_LIMIT = 5 * 10**9


def planning(setting: Setting) -> Iterator[Table]:
    """What rank 0 does from the moment all have said what they hold until it knows what to write."""
    plans = {f"holdfast, {ranks} ranks": Contender(partial(plan, *held(ranks))) for ranks in _RANKS}
    clock = interleaved(plans, setting.rounds)
    yield clock.table(f"plan of a save, {PARAMETERS} parameters with AdamW")
    told = {f"holdfast, {ranks} ranks": Figure((float(_told(ranks)),)) for ranks in _RANKS}
    yield Table(f"metadata that one rank tells others, {PARAMETERS} parameters with AdamW", "bytes", told)


def held(ranks: int) -> tuple[int, Spec, Meshes]:
    """What each of the ranks holds."""
    shape = (8 * ranks, 1024)
    names = [f"layers.{number}.weight" for number in range(PARAMETERS)]
    tensors = [TensorSpec("model", name, "F32", shape, 0) for name in names]
    tensors += [TensorSpec("optimizer", f"{name}/{key}", "F32", shape, 0) for name in names for key in _MOMENTS]
    tensors += [TensorSpec("optimizer", f"{name}/step", "F32", ()) for name in names]
    return (
        ranks,
        Spec((LayoutSpec(0, (Sharded(0),)),), tuple(tensors)),
        Meshes((MeshShape((ranks,), tuple(range(ranks))),)),
    )


def sharded(ranks: int, number: int) -> tuple[int, Spec, Meshes]:
    """So many tensors, of which each of the ranks holds some rows."""
    tensors = (TensorSpec("model", f"layers.{one}.weight", "F32", (8 * ranks, 1024), 0) for one in range(number))
    return (
        ranks,
        Spec((LayoutSpec(0, (Sharded(0),)),), tuple(tensors)),
        Meshes((MeshShape((ranks,), tuple(range(ranks))),)),
    )


def plan(ranks: int, spec: Spec, meshes: Meshes) -> None:
    posted = [SpecDigests(*digest_specs(spec, meshes))] * ranks
    census = SpecDirectory.take(posted)
    told = [census.told_by(0, spec, meshes), *[(b"", b"")] * (ranks - 1)]
    membership: GlobalSpec = census.membership(told, range(ranks))
    plan_save(membership, ranks // 2, _LIMIT)


def _told(ranks: int) -> int:
    """Bytes that a rank posts when nothing has changed since the save before: digests."""
    _, spec, meshes = held(ranks)
    return sum(map(len, digest_specs(spec, meshes)))
