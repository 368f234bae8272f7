"""Imports go downward only, and what must stay light stays light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src/holdfast"

#: From the top of the house to its foundation.
FLOORS = [
    {"__main__"},
    {"lightning", "transformers", "compat"},
    {"cli"},
    {"dcp"},
    {"functions", "view", "data", "stopping"},
    {"verification"},
    {"parts"},
    {"checkpointer", "conversion"},
    {"falling_back"},
    {"background"},
    {"handle"},
    {"saving", "loading"},
    {"moving"},
    {"agreement", "reading", "finding", "fusing", "readback"},
    {"request", "telling"},
    {"restored", "drafts"},
    {"upkeep"},
    {"retention"},
    {"corruption"},
    {"catalog"},
    {"survey"},
    {"state", "formats"},
    {"engine"},
    {"storage", "layout"},
    {"terminal"},
    {"errors", "events", "garbage", "process_exit", "units", "warning", "_version"},
]


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_downward(file: Path) -> None:
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    rooms = {name.split(".")[1] for name in imports(file) if name.startswith("holdfast.")}
    public = {"__version__", "open", "Checkpoint"}  # the commands may use the public names
    for other in rooms - {room} - (public if room == "cli" else set()):
        assert floor(room) < floor(other), f"{room} imports {other}"


#: Methods of a path that ask or tell the file system something.
ASKING = {"exists", "is_dir", "is_file", "is_symlink", "stat", "lstat", "iterdir", "glob", "rglob", "mkdir", "rmdir"}


def test_only_storage_asks_the_file_system() -> None:
    for file in FILES:
        if file.parent.name == "storage":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING:
                assert ast.unparse(node.func.value) in {"local", "storage", "folders"}, f"{file}:{node.lineno}"


def test_the_map_of_the_house_names_every_room_from_the_top_down() -> None:
    text = (SOURCE.parent.parent / "CONTRIBUTING.md").read_text()
    rooms = re.findall(r"^  (\w+)(?:/|\.py)  ", text.split("src/holdfast/")[1].split("```")[0], re.MULTILINE)
    named = [room for room in rooms if room != "__init__"]
    assert sorted(named) == sorted(set().union(*FLOORS))
    assert named == sorted(named, key=floor)


def test_only_storage_opens_files() -> None:
    for file in FILES:
        if file.parent.name == "storage":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                bare = node.func.id if isinstance(node.func, ast.Name) else ""
                method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                assert bare != "open", file
                assert method not in {"read_text", "write_text", "read_bytes", "write_bytes", "pwrite", "unlink"}, file


def test_the_engine_knows_no_models_and_the_layout_no_torch() -> None:
    for file in FILES:
        room = file.relative_to(SOURCE).parts[0]
        heavy = {name for name in imports(file) if name.split(".")[0] == "torch"}
        if room == "engine":
            assert not {name for name in heavy if name.startswith(("torch.nn", "torch.optim"))}, file
        if room in {"layout", "storage", "formats"}:
            assert not heavy, file


def test_importing_holdfast_imports_no_torch() -> None:
    code = "import sys, holdfast; sys.exit(int('torch' in sys.modules or 'numpy' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
