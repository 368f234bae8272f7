"""The table in the documentation has the promises that are tested, and the cells that are not."""

from tests.promises.table import PAGE, replace_table


def test_the_page_has_the_table_of_now() -> None:
    page = PAGE.read_text()
    assert replace_table(page) == page, "run python -m tests.promises.table"
