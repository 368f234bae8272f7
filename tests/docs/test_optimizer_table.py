"""The table of optimizers in ``docs/optimizers-and-families.md`` is what the campaign gave, and none is silent."""

from campaigns.optimizers.table import PAGE, read_results, replace_section
from campaigns.optimizers.verdict import SILENT, WRONG


def test_the_section_is_written_from_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == replace_section(page, read_results()), "run python -m campaigns.optimizers packages --write"


def test_no_optimizer_is_restored_wrongly() -> None:
    results = read_results()
    assert results
    kinds = {
        kind
        for of_package in results.values()
        for layout in ("plain", "fsdp2")
        for kind, _ in of_package[layout].values()
    }
    assert not kinds & {SILENT, WRONG}
