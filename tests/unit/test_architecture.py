"""Tests rules that import-linter cannot check: who opens files, what small processes import, and what tests share."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import rankless
from rankless.formats import registry
from rankless.public_names import read_modules

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/rankless"


def imports(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


#: Methods of a path that ask or tell the file system something.
ASKING = {"exists", "is_dir", "is_file", "is_symlink", "stat", "lstat", "iterdir", "glob", "rglob", "mkdir", "rmdir"}


def test_only_storage_asks_the_file_system() -> None:
    for file in FILES:
        if "storage" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING:
                assert ast.unparse(node.func.value).split("(")[0] in {"posix", "store", "store_of"}, (
                    f"{file}:{node.lineno}"
                )


def test_only_storage_opens_files() -> None:
    for file in FILES:
        if "storage" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                bare = node.func.id if isinstance(node.func, ast.Name) else ""
                method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                assert bare != "open", file
                assert method not in {"read_text", "write_text", "read_bytes", "write_bytes", "pwrite", "unlink"}, file


def test_the_engine_knows_no_models() -> None:
    for file in FILES:
        if file.relative_to(SOURCE).parts[0] == "engine":
            assert not {name for name in imports(file) if name.startswith(("torch.nn", "torch.optim"))}, file


def test_every_public_name_is_in_the_stub_and_in_its_module() -> None:
    stub = ast.parse((SOURCE / "__init__.pyi").read_text())
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    names = {alias.name: statement.module for statement in imports for alias in statement.names}
    assert len(imports) == len(stub.body)
    assert all(alias.asname == alias.name for statement in imports for alias in statement.names)
    assert read_modules() == names
    assert rankless.__all__ == dir(rankless) == sorted(names)
    for name, module in names.items():
        assert getattr(rankless, name) is getattr(import_module(str(module)), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rankless.nothing


def test_importing_rankless_imports_nothing_else() -> None:
    code = "import sys; before = {*sys.modules}; import rankless; print(*{*sys.modules} - before)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "rankless\n"
    )


def test_a_save_imports_no_code_of_loads_and_no_reader_of_another_format() -> None:
    code = """
import sys, tempfile, torch, rankless
rankless.save_checkpoint(tempfile.mkdtemp(), "a", {"w": torch.zeros(1)})
print(*(name for name in sys.modules if name.startswith("rankless.")))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = {name.removeprefix("rankless.") for name in done.stdout.split()}
    formats = {name for name in names if name.startswith("formats.")}
    assert formats == {"formats.native", "formats.reader", "formats.safetensors"}
    assert {name for name in names if name.startswith("load.")} == {"load.result"}
    assert not {name for name in names if name.startswith(("components", "conversion", "compat", "cli", "dcp"))}
    assert len(names) <= 177


def test_every_format_in_the_registry_exists() -> None:
    paths = [path for known in registry.READABLE.values() for path in (known.detect, known.reader)]
    for path in [*paths, *registry.TARGETS.values()]:
        assert callable(registry.load_attribute(path))


def imports_of_tests(file: Path) -> set[str]:
    """Return the imported names that lie in a module with tests."""
    return {name for name in imports(file) if any(part.startswith("test_") for part in name.split("."))}


@pytest.mark.parametrize("folder", ["tests", "campaigns", "benchmarks"])
def test_nothing_imports_a_module_with_tests(folder: str) -> None:
    """What several tests share is in ``tests/helpers`` or in a ``conftest.py``."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert {str(file): names for file in files if (names := imports_of_tests(file))} == {}
