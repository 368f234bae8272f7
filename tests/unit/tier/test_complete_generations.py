"""Tests which generations of the local tier count: complete ones that are current in the history of the run."""

from __future__ import annotations

from rankless.ondisk.manifest import Manifest, Provenance
from rankless.run.history import Branch, Entry
from rankless.tier.generation_catalog import HostOffer, OfferedGeneration, find_complete
from rankless.tier.job_text import name_job, parse_job_number, parse_run_token
from rankless.tier.part_names import GenerationKey

RUN = "0" * 16


def offer(
    host: str, incarnation: int, sequence: int, ranks: list[int], size: int = 2, *, labelled: bool = True
) -> HostOffer:
    manifest = Manifest(
        format="rankless",
        version=1,
        tag="t",
        id=f"{sequence:016x}",
        run=RUN,
        incarnation=incarnation,
        sequence=sequence,
        time=0.0,
        step=None,
        metrics={},
        provenance=Provenance("", "", "", size),
        files={},
    )
    key = GenerationKey(incarnation, sequence, f"{sequence:016x}")
    return HostOffer(host, "", [OfferedGeneration(key, size, ranks, manifest if labelled else None)])


def history(branch: Branch) -> Entry:
    return Entry(branch.incarnation, runs={RUN: branch})


def test_parts_of_several_hosts_make_a_generation_complete() -> None:
    offers = [offer("a", 1, 1, [0]), offer("b", 1, 1, [1]), offer("a", 1, 2, [0])]
    assert [one.key.sequence for one in find_complete(offers, history(Branch(1, 1)))] == [1]


def test_a_generation_without_a_label_is_incomplete() -> None:
    assert find_complete([offer("a", 1, 1, [0, 1], labelled=False)], history(Branch(1, 1))) == []


def test_a_generation_after_the_checkpoint_from_which_the_run_went_on_does_not_count() -> None:
    continued = history(Branch(2, 6, ((1, 5),)))
    assert find_complete([offer("a", 1, 6, [0, 1])], continued) == []
    assert [one.key.sequence for one in find_complete([offer("a", 1, 5, [0, 1])], continued)] == [5]


def test_the_text_of_a_job_has_its_number() -> None:
    text = name_job(17, "12ab", "0af3")
    assert (parse_job_number(text), parse_run_token(text)) == (17, "12ab")
    for other in ("", "0af3", "17-12ab-0af3", "a job"):
        assert (parse_job_number(other), parse_run_token(other)) == (0, "")
