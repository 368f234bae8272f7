"""Tests that the spec which all ranks share needs no encoding to be the spec of each of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rankless.engine.comm.spec_directory import SpecDirectory, digest_specs
from rankless.engine.plan.global_spec import GlobalSpec
from rankless.errors import RanklessError
from tests.helpers.examples import examples
from tests.helpers.simulated_jobs import Job, jobs


@given(jobs(), st.data())
@settings(max_examples=examples(100))
def test_a_spec_that_all_ranks_share_is_what_its_encoding_says(job: Job, data: st.DataObject) -> None:
    spec, meshes = job.told(data.draw(st.sampled_from(job.ranks)))
    directory = SpecDirectory.from_digests([digest_specs(spec, meshes)] * len(job.ranks))
    assert directory.is_uniform
    encoded = [directory.encode_contribution(rank, spec, meshes) for rank in job.ranks]
    sent = directory.build_global_spec(encoded, job.global_ranks)
    shared = directory.share_spec(spec, meshes, job.global_ranks)
    assert (shared.specs, shared.mesh_tables, shared.group_rank_of) == (
        sent.specs,
        sent.mesh_tables,
        sent.group_rank_of,
    )
    assert list_tensors(shared) == list_tensors(sent)


def list_tensors(spec: GlobalSpec) -> list[object] | str:
    try:
        return list(spec.iter_tensors())
    except RanklessError as error:  # a shard that no rank holds
        return str(error)
