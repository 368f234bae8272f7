"""Planning of a save and a load on one rank of a job with many simulated ranks: FSDP2 with AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.measure import Contender, Figure, Table, time_interleaved
from benchmarks.setting import Setting
from rankless.engine.comm.spec_directory import SpecDigests, SpecDirectory, digest_specs
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.engine.plan.layout_types import MeshShape, Sharded
from rankless.engine.plan.save_plan import plan_save
from rankless.engine.plan.tensor_specs import LayoutSpec, Meshes, Spec, TensorSpec

#: The number of parameters, each with two moments and a step count.
PARAMETERS = 2000

_MOMENTS = ("exp_avg", "exp_avg_sq")

_RANKS = (8, 64, 512, 4096)
_LIMIT = 5 * 10**9


def measure_planning(setting: Setting) -> Iterator[Table]:
    """Measure rank 0 from receiving the specs of all ranks to its finished plan."""
    plans = {f"rankless, {ranks} ranks": Contender(partial(build_plan, *build_shards(ranks))) for ranks in _RANKS}
    clock = time_interleaved(plans, setting.rounds)
    yield clock.build_table(f"plan of a save, {PARAMETERS} parameters with AdamW")
    nbytes = {f"rankless, {ranks} ranks": Figure((float(_told(ranks)),)) for ranks in _RANKS}
    yield Table(f"metadata that one rank tells others, {PARAMETERS} parameters with AdamW", "bytes", nbytes)


def build_shards(ranks: int) -> tuple[int, Spec, Meshes]:
    """Return the tensors of each rank."""
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


def build_sharded_specs(ranks: int, number: int) -> tuple[int, Spec, Meshes]:
    """Return tensors of which each rank holds some rows."""
    tensors = (TensorSpec("model", f"layers.{layer}.weight", "F32", (8 * ranks, 1024), 0) for layer in range(number))
    return (
        ranks,
        Spec((LayoutSpec(0, (Sharded(0),)),), tuple(tensors)),
        Meshes((MeshShape((ranks,), tuple(range(ranks))),)),
    )


def build_plan(ranks: int, spec: Spec, meshes: Meshes) -> None:
    posted = [SpecDigests(*digest_specs(spec, meshes))] * ranks
    census = SpecDirectory.from_digests(posted)
    contributions = [census.encode_contribution(0, spec, meshes), *[(b"", b"")] * (ranks - 1)]
    membership: GlobalSpec = census.build_global_spec(contributions, range(ranks))
    plan_save(membership, ranks // 2, _LIMIT)


def _told(ranks: int) -> int:
    """Return the bytes that a rank posts if nothing has changed since the previous save: digests."""
    _, spec, meshes = build_shards(ranks)
    return sum(map(len, digest_specs(spec, meshes)))
