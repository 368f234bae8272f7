"""Tests that imports are found which only a running program resolves: ``campaigns/imports.py``."""

import ast
from pathlib import Path

from campaigns.imports import (
    ROOT,
    Imports,
    Names,
    list_fixture_imports,
    list_late_imports,
    list_page_imports,
    list_stub_imports,
    list_typed_imports,
)
from rankless.public_names import read_modules

NAMES = Names(
    {"rankless", "rankless.first", "rankless.outer", "rankless.outer.inner", "rankless.runs.__main__", "rankless.runs"},
    {"rankless": {"begin": "rankless.first", "Inner": "rankless.outer.inner"}},
)


def code(text):
    return tuple(ast.walk(ast.parse(text)))


def late(text, *, texts=True):
    return set(list_late_imports(code(text), NAMES, texts=texts)) - {"rankless"}


def test_the_names_of_a_lazy_package_are_those_that_it_imports_for_type_checkers() -> None:
    package = "if TYPE_CHECKING:\n    from rankless.first import begin, go_on as resume\n"
    lazy = package + "def __getattr__(name): ...\n"
    assert list_typed_imports(code(lazy)) == {"begin": "rankless.first", "resume": "rankless.first"}
    assert list_typed_imports(code(package)) == {}


def test_the_names_of_a_package_with_a_stub_are_those_of_the_stub(tmp_path: Path) -> None:
    (tmp_path / "__init__.pyi").write_text(
        "from rankless.first import begin as begin\nfrom rankless.b import End as End\n"
    )
    assert list_stub_imports(tmp_path / "__init__.py") == {"begin": "rankless.first", "End": "rankless.b"}
    assert list_stub_imports(ROOT / "src/rankless/__init__.py") == read_modules()
    assert list_stub_imports(tmp_path / "other/__init__.py") == {}


def test_an_attribute_of_the_package_is_an_import_of_its_module() -> None:
    assert late("import rankless\nrankless.begin('a')") == {"rankless.first"}
    assert late("import rankless as r\ndef f():\n    r.Inner") == {"rankless.outer.inner"}
    assert late("from rankless import Inner") == {"rankless.outer.inner"}
    assert late("import rankless\nrankless.unknown") == set()
    assert late("rankless.begin()") == set()


def test_a_module_path_in_a_registry_is_an_import() -> None:
    expected = {"rankless.outer", "rankless.outer.inner"}
    assert late("'rankless.outer.inner:Inner'", texts=False) == set(), "a string alone is a docstring"
    assert late("x = 'rankless.outer.inner:Inner'", texts=False) == expected
    assert late("x = 'rankless.outer.inner'", texts=False) == expected
    assert late("x = 'call rankless.begin again'", texts=False) == set()


def test_scripts_and_commands_in_strings_import() -> None:
    assert late("x = 'import rankless; rankless.begin(1)'") == {"rankless.first"}
    assert late("x = 'from rankless import Inner, begin'") == {"rankless.first", "rankless.outer.inner"}
    assert late("run([python, '-m', 'rankless.runs', 'ls'])") == {"rankless.runs", "rankless.runs.__main__"}


def test_a_module_that_is_named_with_a_placeholder_may_be_any() -> None:
    assert late("import_module(f'rankless.outer.{name}')") == {"rankless.outer", "rankless.outer.inner"}


def test_a_test_imports_what_the_fixtures_use_that_it_requests() -> None:
    conftest = code(
        "from rankless.first import begin\nfrom rankless.outer import inner\n"
        "@fixture\ndef saved(path): begin(path)\n"
        "@fixture\ndef path(): ...\n"
        "@fixture\ndef both(saved): inner.Inner\n"
    )

    def fixtures(test):
        return set(list_fixture_imports(code(test), [conftest], NAMES)) - {"rankless"}

    assert fixtures("def test(path): ...") == set()
    assert fixtures("def test(saved): ...") == {"rankless.first"}
    assert fixtures("def test(both): ...") == {"rankless.first", "rankless.outer", "rankless.outer.inner"}


def test_a_test_that_reads_pages_imports_what_they_name(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("`rankless.begin`")
    assert set(list_page_imports(code("x = 'README'"), tmp_path, NAMES)) == {"rankless", "rankless.first"}
    assert set(list_page_imports(code("x = 'other'"), tmp_path, NAMES)) == set()


def test_the_distance_is_the_length_of_the_shortest_chain_of_imports() -> None:
    direct = {"a": {"b", "c"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"a", "d"}}
    imports = Imports({}, {name: frozenset(names) for name, names in direct.items()})
    assert imports.distances(["d"]) == {"d": 0, "c": 1, "e": 1, "a": 2, "b": 2}
    assert imports.distances(["b", "e"]) == {"b": 0, "e": 0, "a": 1}
