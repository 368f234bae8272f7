"""Which modules of rankless, its tests and its campaigns import which: used by ``near`` and ``mutate``.

Most imports are grimp's. The others are those that only a running program resolves: ``rankless.save_checkpoint``, which
``rankless/__init__.py`` imports at its first use, modules that a registry names as text, code in strings, fixtures.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("rankless", "tests", "campaigns")

_DOTTED = re.compile(rf"\b(?:{'|'.join(PACKAGES)})(?:\.\w+)+\.?")
_IMPORT_FROM = re.compile(rf"\bfrom ((?:{'|'.join(PACKAGES)})[\w.]*) import ([\w, ]+)")
_MODULE_PATH = re.compile(r"[\w.]+(:\w+)?")


#: All nodes of a syntax tree, the module first. To walk through a tree takes as long as to parse it.
Code = Sequence[ast.AST]


@dataclass(frozen=True)
class Names:
    """The modules that exist, and the names that a package imports at their first use, with their modules."""

    modules: Collection[str]
    lazy: Mapping[str, Mapping[str, str]]

    def resolve(self, dotted: str) -> Iterator[str]:
        """Yield the modules that ``dotted`` imports. A trailing dot, as of an f-string, stands for any name."""
        if dotted.endswith(".") and dotted[:-1] not in self.lazy:
            yield from (module for module in self.modules if module.startswith(dotted))
        package, *parts = dotted.rstrip(".").split(".")
        if package in self.modules:
            yield package
        for part in parts:
            lazy = self.lazy.get(package, {}).get(part)
            if f"{package}.{part}" not in self.modules:
                yield from [lazy] if lazy else []
                return
            package = f"{package}.{part}"
            yield package


@dataclass(frozen=True)
class Imports:
    """The file of each module, and the modules that it imports."""

    files: Mapping[str, Path]
    direct: Mapping[str, frozenset[str]]

    def distances(self, targets: Collection[str]) -> dict[str, int]:
        """Return the modules that import one of ``targets``, directly or not, and the length of the shortest path."""
        importers: dict[str, set[str]] = {}
        for module, names in self.direct.items():
            for name in names:
                importers.setdefault(name, set()).add(module)
        distances = dict.fromkeys(targets, 0)
        queue = list(distances)
        for module in queue:
            for importer in sorted(importers.get(module, set()) - distances.keys()):
                distances[importer] = distances[module] + 1
                queue.append(importer)
        return distances


def read_imports(root: Path = ROOT) -> Imports:
    """Return the imports of the tree at ``root``, which must be the one that Python imports."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    files = {module: _file_of(root, module) for module in graph.modules}
    codes = {module: read_code(file) for module, file in files.items()}
    inits = {module: file for module, file in files.items() if file.name == "__init__.py"}
    lazy = {module: list_stub_imports(file) or list_typed_imports(codes[module]) for module, file in inits.items()}
    names = Names(graph.modules, {module: known for module, known in lazy.items() if known})
    direct: dict[str, frozenset[str]] = {}
    for module, code in codes.items():
        imported = set(graph.find_modules_directly_imported_by(module))
        if module not in names.lazy:
            imported.update(list_late_imports(code, names, texts=not module.startswith("rankless")))
        if is_test(module):
            conftests = [conftest for name, conftest in codes.items() if _is_conftest_of(name, module)]
            imported.update(list_fixture_imports(code, conftests, names))
            imported.update(list_page_imports(code, root, names))
        direct[module] = frozenset(parent for name in imported for parent in _list_parents(name)) - {module}
    return Imports(files, direct)


def read_code(file: Path) -> Code:
    """Return the nodes of a source file."""
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def is_test(module: str) -> bool:
    """Return whether pytest collects tests from this module."""
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")


def list_stub_imports(init: Path) -> dict[str, str]:
    """Return the names in the stub of a package, which the package imports at their first use, with their modules."""
    stub = init.with_suffix(".pyi")
    return _list_names(read_code(stub)) if stub.is_file() else {}


def list_typed_imports(code: Code) -> dict[str, str]:
    """Return the names that a package imports under ``TYPE_CHECKING``, which it imports at their first use.

    They are mapped to their modules. The result is empty for a package without ``__getattr__``.
    """
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in code):
        return {}
    blocks = [node.body for node in code if isinstance(node, ast.If)]
    return _list_names(node for block in blocks for node in block)


def _list_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def list_late_imports(code: Code, names: Names, *, texts: bool) -> Iterator[str]:
    """Yield the modules that are imported by attributes, and by strings that are no docstrings.

    With ``texts``, a module may be named anywhere in a string, which may be a script. Otherwise it must be the whole
    string, because messages name functions too.
    """
    bound = dict(_list_bindings(code))
    docstrings = {id(node.value) for node in code if isinstance(node, ast.Expr)}
    for node in code:
        if isinstance(node, ast.ImportFrom) and node.module in names.lazy:
            for alias in node.names:
                yield from names.resolve(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute):
            head, _, tail = _read_dotted(node).partition(".")
            if head in bound:
                yield from names.resolve(f"{bound[head]}.{tail}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            if texts:
                yield from _list_text_imports(node.value, names)
            elif _MODULE_PATH.fullmatch(node.value) and node.value.partition(".")[0] in PACKAGES:
                yield from names.resolve(node.value.partition(":")[0])
        elif isinstance(node, (ast.List, ast.Tuple, ast.Call)):
            yield from _list_commands(node.args if isinstance(node, ast.Call) else node.elts, names)


def list_fixture_imports(test: Code, conftests: Collection[Code], names: Names) -> Iterator[str]:
    """Yield the modules of the names that the fixtures use which ``test`` requests.

    Fixtures of every test (``autouse``) do not count: all tests would reach what these need for a few.
    """
    requested = {node.arg for node in test if isinstance(node, ast.arg)}
    requested |= {str(node.value) for node in test if isinstance(node, ast.Constant)}
    for conftest in conftests:
        bound = dict(_list_bindings(conftest))
        fixtures = {node.name: node for node in conftest if isinstance(node, ast.FunctionDef)}
        queue = [name for name in fixtures if name in requested]
        for name in queue:
            arguments = {node.arg for node in ast.walk(fixtures[name]) if isinstance(node, ast.arg)}
            queue += [other for other in fixtures if other in arguments and other not in queue]
            for node in ast.walk(fixtures[name]):
                if isinstance(node, ast.Attribute) and _read_dotted(node).partition(".")[0] in bound:
                    head, _, tail = _read_dotted(node).partition(".")
                    yield from names.resolve(f"{bound[head]}.{tail}")
                elif isinstance(node, ast.Name) and node.id in bound:
                    yield from names.resolve(bound[node.id])


def list_page_imports(test: Code, root: Path, names: Names) -> Iterator[str]:
    """Yield the modules that the pages name which ``test`` reads, because it may run their code."""
    for path in list_named_paths(test):
        page, folder = root / f"{path.removesuffix('.md')}.md", root / path
        for file in [page] if page.is_file() else sorted(folder.rglob("*.md")) if path == "docs" else []:
            yield from _list_text_imports(file.read_text(encoding="utf-8"), names)


def list_named_paths(code: Code) -> set[str]:
    """Return the strings of ``code`` that may be paths in the repository."""
    strings = (node.value for node in code if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text.strip("/") for text in strings if re.fullmatch(r"[\w./-]*\w/?", text)}


def _list_text_imports(text: str, names: Names) -> Iterator[str]:
    for dotted in _DOTTED.findall(text):
        yield from names.resolve(dotted)
    for module, imported in _IMPORT_FROM.findall(text):
        for name in imported.split(","):
            yield from names.resolve(f"{module}.{name.split()[0]}" if name.split() else module)


def _list_commands(arguments: Collection[ast.expr], names: Names) -> Iterator[str]:
    """Yield the modules that ``-m`` runs in the arguments of a process."""
    texts = [node.value if isinstance(node, ast.Constant) else None for node in arguments]
    for option, name in pairwise(texts):
        if option == "-m" and isinstance(name, str):
            yield from names.resolve(f"{name}.__main__")


def _list_bindings(code: Code) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind, and what they stand for."""
    for node in code:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (root, root)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _read_dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` of an attribute of a name, and an empty string of another expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := _read_dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""


def _list_parents(module: str) -> Iterator[str]:
    """Yield ``module`` and the packages around it, which Python imports first."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _is_conftest_of(name: str, test: str) -> bool:
    package, _, last = name.rpartition(".")
    return last == "conftest" and test.startswith(f"{package}.")


def _file_of(root: Path, module: str) -> Path:
    path = (root / "src" if module.partition(".")[0] == "rankless" else root).joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
