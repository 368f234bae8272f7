"""Tests that ``make test-near`` leaves out no test that can reach a change."""

from pathlib import Path

import pytest

from campaigns.imports import Imports
from campaigns.near import select_tests

FILES = {
    "src/rankless/first.py": "",
    "src/rankless/third/__init__.py": "",
    "src/rankless/third/page.py": "",
    "src/rankless/third/assets/page.js": "",
    "tests/conftest.py": "",
    "tests/helpers/pool.py": "",
    "tests/unit/test_api.py": "",
    "tests/unit/test_page.py": "",
    "tests/docs/test_pages.py": "PAGES = ['README', 'docs']",
    "tests/peers/test_peer.py": "",
}
DIRECT = {
    "tests.unit.test_api": {"rankless.first"},
    "tests.unit.test_page": {"rankless.third.page"},
    "tests.peers.test_peer": {"rankless.first"},
    "tests.conftest": {"tests.helpers.pool"},
    "tests.helpers.pool": {"rankless.first"},
}


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("src/rankless/first.py", {"unit/test_api"}),
        ("src/rankless/third/page.py", {"unit/test_page"}),
        ("src/rankless/third/assets/page.js", {"unit/test_page"}),
        ("tests/unit/test_page.py", {"unit/test_page"}),
        ("conftest.py", {"unit/test_api", "unit/test_page", "docs/test_pages"}),
        ("tests/unit/conftest.py", {"unit/test_api", "unit/test_page"}),
        ("tests/conftest.py", {"unit/test_api", "unit/test_page", "docs/test_pages"}),
        ("tests/helpers/pool.py", {"unit/test_api", "unit/test_page", "docs/test_pages"}),
        ("README.md", {"docs/test_pages"}),
        ("docs/guides/ray.md", {"docs/test_pages"}),
        ("Makefile", set()),
    ],
)
def test_the_tests_that_can_reach_a_change_are_selected(changed: str, selected: set[str], tmp_path: Path) -> None:
    files = {}
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        if name.endswith(".py"):
            module = name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            files[module] = tmp_path / name
    imports = Imports(files, {module: frozenset(DIRECT.get(module, ())) for module in files})
    assert select_tests([changed], imports, tmp_path) == sorted(f"tests/{name}.py" for name in selected)
