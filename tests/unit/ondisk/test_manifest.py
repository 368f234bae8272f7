"""Tests ``manifest.json`` against a JSON parser, the published JSON Schema, and every flip of one bit."""

from __future__ import annotations

import itertools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rankless
from rankless.errors import CorruptCheckpointError, FormatError, RanklessError, UnsafeNameError
from rankless.ondisk import manifest
from rankless.ondisk.block_crcs import crc64
from rankless.ondisk.manifest import FileRecord, Manifest, Provenance
from rankless.run.checkpoint_info import CheckpointInfo
from tests.helpers.crc import crc64_by_bits
from tests.helpers.examples import examples

FILE = "run/step_7/manifest.json"

hexes = st.text("0123456789abcdef", min_size=16, max_size=16)
counts = st.integers(0, 2**62)
plain_names = st.lists(st.text("abcXYZ019_-. é", min_size=1, max_size=6), min_size=1, max_size=3).map("/".join)
safe_names = plain_names.filter(lambda name: not {"", ".", ".."} & set(name.split("/")))
records = st.builds(FileRecord, counts, hexes, counts, st.none() | hexes)
manifests = st.builds(
    Manifest,
    format=st.just("rankless"),
    version=st.just(1),
    tag=st.text(max_size=8),
    id=hexes,
    run=hexes,
    sequence=counts,
    time=st.floats(0, 1e11),
    step=st.none() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False),
    metrics=st.dictionaries(
        st.text(max_size=8), st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3
    ),
    provenance=st.builds(Provenance, st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), counts),
    files=st.dictionaries(safe_names, records, max_size=4),
)


def example(**changes: Any) -> Manifest:
    return Manifest(
        **{
            "format": "rankless",
            "version": 1,
            "tag": "step_7",
            "id": "0" * 15 + "1",
            "run": "0" * 15 + "2",
            "sequence": 3,
            "time": 1.5,
            "step": 7,
            "metrics": {"loss": 0.5, "broken": None},
            "provenance": Provenance("1.0", "2.13.0", "3.11.7", 4),
            "files": {
                "model/model.safetensors": FileRecord(4100, "a" * 16, 4096, "b" * 16),
                "state.json": FileRecord(2, "c" * 16),
            },
            **changes,
        }
    )


def sealed(table: dict[str, Any] | str) -> bytes:
    """A manifest of this JSON with a right CRC, made without rankless."""
    text = table if isinstance(table, str) else json.dumps(table, indent=2)
    body = text.removesuffix("\n}").encode()
    return body + b',\n  "crc64nvme": "%016x"\n}\n' % crc64_by_bits(body)


def table(**changes: Any) -> dict[str, Any]:
    """The JSON of the example, without its CRC."""
    report = json.loads(manifest.encode_manifest(example()))
    del report["crc64nvme"]
    return {**report, **changes}


@given(manifests)
def test_what_is_written_comes_back(one: Manifest) -> None:
    assert manifest.decode_manifest(manifest.encode_manifest(one), FILE) == one


@given(manifests)
@settings(max_examples=examples(40))
def test_it_is_json_of_the_published_schema(one: Manifest) -> None:
    schema = json.loads(manifest.manifest_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(manifest.encode_manifest(one)), schema)


def test_the_published_schema_is_the_one_that_is_checked() -> None:
    assert (files("rankless.ondisk") / "manifest.schema.json").read_bytes() == manifest.manifest_schema()


def test_its_last_line_is_the_crc_of_all_before_it() -> None:
    raw = manifest.encode_manifest(example())
    body, crc = raw.split(b',\n  "crc64nvme": ')
    assert crc == b'"%016x"\n}\n' % crc64_by_bits(body)
    assert sealed(table()) == raw


def test_a_flipped_bit_in_the_manifest_is_named() -> None:
    raw = manifest.encode_manifest(example())
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError, match=FILE):
            manifest.decode_manifest(bytes(flipped), FILE)


def test_a_manifest_cut_short_anywhere_is_named() -> None:
    raw = manifest.encode_manifest(example())
    for size in range(len(raw)):
        with pytest.raises(CorruptCheckpointError, match=FILE):
            manifest.decode_manifest(raw[:size], FILE)


def test_bytes_after_the_end_are_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match=FILE):
        manifest.decode_manifest(manifest.encode_manifest(example()) + b"\n", FILE)


@given(st.binary(max_size=100))
def test_noise_is_named(noise: bytes) -> None:
    with pytest.raises(RanklessError, match=FILE):
        manifest.decode_manifest(noise, FILE)


@pytest.mark.parametrize("version", [2, 10, 2**31, 2**80])
def test_a_newer_version_is_named_as_such(version: int) -> None:
    for raw in (sealed(table(version=version, new_field=[])), b'{"format":"rankless","version":%d}' % version):
        with pytest.raises(FormatError, match=f"{FILE} has format version {version}.*update rankless"):
            manifest.decode_manifest(raw, FILE)


@pytest.mark.parametrize(
    "text", [b"{}", b'{"name": "a web page", "icons": []}', b'{"format": "torch_dcp", "version": 3}']
)
def test_a_manifest_of_something_else_is_no_checkpoint_of_ours(text: bytes) -> None:
    with pytest.raises(FormatError, match=f"{FILE} is not a rankless manifest"):
        manifest.decode_manifest(text, FILE)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 0},
        {"version": -1},
        {"format": "rankless2"},
    ],
    ids=str,
)
def test_a_sealed_manifest_of_another_format_is_no_checkpoint_of_ours(changes: dict) -> None:
    with pytest.raises(FormatError, match=f"{FILE} is not a rankless manifest"):
        manifest.decode_manifest(sealed(table(**changes)), FILE)


def record(**changes: Any) -> dict[str, Any]:
    return {"state.json": {"size": 1, "crc64nvme": "0" * 16, **changes}}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "1"},
        {"version": 1.5},
        {"tag": None},
        {"tag": 7},
        {"id": "xyz"},
        {"run": "A" * 16},
        {"sequence": -1},
        {"sequence": 1.5},
        {"sequence": 2**63},
        {"sequence": 2**70},
        {"id": "a" * 16 + "\n"},
        {"run": "a" * 16 + "\n"},
        {"time": "now"},
        {"step": "7"},
        {"step": True},
        {"metrics": {"loss": "low"}},
        {"metrics": [1]},
        {"provenance": []},
        {"provenance": {"world_size": -1}},
        {"provenance": {"world_size": 2**80}},
        {"files": ["state.json"]},
        {"files": {"state.json": None}},
        {"files": record(size=-1)},
        {"files": record(size="1")},
        {"files": record(size=2**63)},
        {"files": record(crc64nvme="0" * 16 + "\n")},
        {"files": record(crc64nvme="0" * 15)},
        {"files": record(header_size=-8)},
        {"files": record(header_crc64nvme="z" * 16)},
    ],
    ids=str,
)
def test_what_the_schema_refuses_is_refused(changes: dict) -> None:
    raw = sealed(table(**changes))
    with pytest.raises(CorruptCheckpointError, match=FILE):
        manifest.decode_manifest(raw, FILE)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(raw), json.loads(manifest.manifest_schema()))


@pytest.mark.parametrize(
    "changes", [{"surprise": {"a": [1]}}, {"provenance": {}}, {"files": record(surprise=1)}], ids=str
)
def test_what_a_later_writer_adds_is_passed_over(changes: dict) -> None:
    raw = sealed(table(**changes))
    jsonschema.validate(json.loads(raw), json.loads(manifest.manifest_schema()))
    assert manifest.decode_manifest(raw, FILE).sequence == example().sequence


@pytest.mark.parametrize("field", [name for name in table() if name not in {"format", "version", "incarnation"}])
def test_a_field_that_is_missing_is_damage(field: str) -> None:
    rest = {name: value for name, value in table().items() if name != field}
    with pytest.raises(CorruptCheckpointError, match=f"(?s){FILE}.*{field}"):
        manifest.decode_manifest(sealed(rest), FILE)


def test_the_largest_numbers_are_read() -> None:
    largest = 2**63 - 1
    for changes in ({"sequence": largest}, {"step": largest}, {"step": -largest}, {"step": 1e300}):
        raw = sealed(table(**changes))
        jsonschema.validate(json.loads(raw), json.loads(manifest.manifest_schema()))
        assert {name: getattr(manifest.decode_manifest(raw, FILE), name) for name in changes} == changes


@pytest.mark.parametrize("step", [2**63, -(2**63), 10**300], ids=["2**63", "-2**63", "10**300"])
def test_a_step_that_has_more_than_64_bits_is_damage(step: int) -> None:
    """JSON Schema cannot say so: there an integer is a number, too."""
    with pytest.raises(CorruptCheckpointError, match=FILE):
        manifest.decode_manifest(sealed(table(step=step)), FILE)


@pytest.mark.parametrize("sequence", [2**70, 2**64 - 1, 2**63 - 1])
def test_a_run_goes_on_beside_a_manifest_with_a_huge_number(tmp_path: Path, sequence: int) -> None:
    """Beyond the limit it is corrupt; at the limit the next save has the same number and a later time."""
    rankless.save_checkpoint(tmp_path, "step_1", {"w": torch.zeros(1)})
    file = tmp_path / "step_1/manifest.json"
    report = json.loads(file.read_bytes())
    del report["crc64nvme"]
    file.write_bytes(sealed({**report, "sequence": sequence}))
    for step in (2, 3):
        rankless.save_checkpoint(tmp_path, f"step_{step}", {"w": torch.full((1,), float(step))})
        assert rankless.open(tmp_path).path.name == f"step_{step}"


def test_a_field_that_is_there_twice_is_damage() -> None:
    text = json.dumps(table(), indent=2).replace('"sequence": 3', '"sequence": 4, "sequence": 3')
    with pytest.raises(CorruptCheckpointError, match=FILE):
        manifest.decode_manifest(sealed(text), FILE)
    text = json.dumps(table(), indent=2).replace('"state.json": {', '"state.json": {"size":1}, "state.json": {')
    with pytest.raises(CorruptCheckpointError, match=FILE):
        manifest.decode_manifest(sealed(text), FILE)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "model/../../x",
        "/etc/passwd",
        "//x",
        "a//b",
        "a/",
        "./a",
        "a/./b",
        "a\\b",
        "..\\x",
        "a\0",
    ],
)
def test_a_name_that_may_leave_the_folder_is_refused(name: str) -> None:
    files = {**table()["files"], name: record()["state.json"]}
    with pytest.raises(UnsafeNameError, match=FILE):
        manifest.decode_manifest(sealed(table(files=files)), FILE)


@pytest.mark.usefixtures("without_garbage")
@pytest.mark.parametrize("nested", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
@pytest.mark.parametrize("field", ["metrics", "surprise", "format"])
def test_a_field_nested_without_end_is_damage(field: str, nested: str) -> None:
    text = json.dumps(table(**{field: "HERE"}), indent=2).replace('"HERE"', nested)
    body = text.removesuffix("\n}").encode()
    with pytest.raises(CorruptCheckpointError, match=FILE):  # sealed() would take a minute
        manifest.decode_manifest(body + b',\n  "crc64nvme": "%016x"\n}\n' % crc64(body), FILE)


def test_the_latest_is_told_by_sequence_then_time_then_id(tmp_path: Path) -> None:
    oldest_first = [
        example(sequence=1, time=9.0, id="f" * 16),
        example(sequence=2, time=1.0, id="f" * 16),
        example(sequence=2, time=2.0, id="0" * 16),
        example(sequence=2, time=2.0, id="1" * 16),
    ]
    for mixed in itertools.permutations(oldest_first):
        ages = sorted(mixed, key=lambda case: CheckpointInfo.of(tmp_path, case).age)
        assert ages == oldest_first


def test_its_bytes_are_those_of_all_files() -> None:
    assert example().nbytes == 4102


def test_it_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        example().tag = "other"
    assert msgspec.structs.replace(example(), tag="other").tag == "other"
