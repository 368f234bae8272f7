"""Tests rules that import-linter cannot check: who opens files, what small processes import, and what tests share."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rankless
from rankless.formats import registry
from rankless.public_names import read_modules

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/rankless"


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def list_nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parse(file)))


def imports(file: Path) -> set[str]:
    names = set()
    for node in list_nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


#: The packages of frameworks.
FRAMEWORKS = {
    *("accelerate", "colossalai", "dcp", "deepspeed", "lightning"),
    *("megatron", "nxd", "ray", "sglang", "torchtitan", "transformers", "vllm"),
}

#: Methods of a path that ask or tell the file system something.
ASKING = {"exists", "is_dir", "is_file", "is_symlink", "stat", "lstat", "iterdir", "glob", "rglob", "mkdir", "rmdir"}


def test_only_storage_asks_the_file_system() -> None:
    for file in FILES:
        if "storage" in file.parts:
            continue
        for node in list_nodes(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING:
                assert ast.unparse(node.func.value).split("(")[0] in {"posix", "store", "store_of"}, (
                    f"{file}:{node.lineno}"
                )


def test_only_storage_opens_files() -> None:
    for file in FILES:
        if "storage" in file.parts:
            continue
        for node in list_nodes(file):
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


#: A model, a stepped optimizer, and functions that save and load them in the run of the first argument.
_PREPARED = """
import json, sys, tempfile, threading, time
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(4)).sum().backward()
optimizer.step()
before = set(sys.modules)
import rankless
run = sys.argv[1]

def save(tag):
    rankless.save_checkpoint(run, tag, model, optimizer)

def load(tag):
    rankless.load_checkpoint(run, tag, model, optimizer)

def imported():
    return sorted(set(sys.modules) - before)
"""

#: Saves and then loads, and prints the modules of rankless after the saves, its dataclasses, and the modules and
#: functions of rankless that the second save and load run, on all threads.
_SAVE_AND_LOAD = """
def count(call):
    codes = set()
    def profile(frame, event, argument):
        if event == "call" and frame.f_globals.get("__name__", "").startswith("rankless"):
            codes.add(frame.f_code)
    threading.setprofile(profile)
    sys.setprofile(profile)
    call("b")
    sys.setprofile(None)
    threading.setprofile(None)
    functions = {(code.co_filename, code.co_qualname) for code in codes if not code.co_name.startswith("<")}
    return len({file for file, _ in functions}), len(functions)

rankless.save_checkpoint(tempfile.mkdtemp(), "a", model, rng=False)
without_generators = imported()
save("a")
saved = imported()
load("a")
modules = [sys.modules[name] for name in imported() if name.startswith("rankless.")]
values = [value for module in modules for value in vars(module).values()]
classes = [value for value in values if isinstance(value, type) and "__dataclass_fields__" in vars(value)]
dataclasses = sorted({cls.__name__ for cls in classes})
time.sleep(3.2)  # from then on a manifest is remembered, whatever the time of the machine
load("a")
ran = [count(save)]
time.sleep(3.2)  # however long that save has taken
ran.append(count(load))
print(json.dumps({"save": saved, "dataclasses": dataclasses, "ran": ran, "bare": without_generators}))
"""


#: Loads, and prints the modules of rankless.
_LOAD = """
load("a")
print(json.dumps({"load": imported()}))
"""


@pytest.fixture(scope="module")
def first_use(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run, result = str(tmp_path_factory.mktemp("run")), {}
    for code in (_SAVE_AND_LOAD, _LOAD):
        command = [sys.executable, "-c", _PREPARED + code, run]
        result |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def modules_of_rankless(imported: list[str]) -> set[str]:
    return {name.removeprefix("rankless.") for name in imported if name.startswith("rankless.")}


def test_a_save_imports_no_code_of_loads_and_no_reader_of_another_format(first_use: dict[str, Any]) -> None:
    names = modules_of_rankless(first_use["save"])
    formats = {name for name in names if name.startswith("formats.")}
    assert formats == {"formats.native", "formats.reader", "formats.safetensors"}
    assert not {name for name in names if name.startswith("load")}
    assert not {name for name in names if name.startswith(("components", "conversion", "cli"))}
    assert not {name for name in names if name.split(".")[0] in FRAMEWORKS}


def test_a_load_of_a_native_checkpoint_imports_no_code_of_saves_and_no_reader_of_another_format(
    first_use: dict[str, Any],
) -> None:
    names = modules_of_rankless(first_use["load"])
    assert {name for name in names if name.startswith("formats.")} == {
        "formats.adapter_configs",
        "formats.detect",
        "formats.native",
        "formats.reader",
        "formats.remapped_reader",
        "formats.safetensors",
        "formats.find_training_step",
    }
    assert {name for name in names if name.startswith("save.")} == {
        "save.background",  # a load waits for the copies of a save
        "save.base_checkpoint",  # the next save shares files with the checkpoint that was loaded
        "save.deferred_errors",
        "save.handle",
        "save.job_memory",
    }
    assert not {name for name in names if name in {"engine.plan.save_plan", "engine.io.write", "state.capture"}}
    assert not {name for name in names if name.startswith(("components", "conversion", "cli"))}
    assert not {name for name in names if name.split(".")[0] in FRAMEWORKS}


def test_a_save_and_a_load_import_few_modules(first_use: dict[str, Any]) -> None:
    """These bounds only fall, unless a promise needs more. Each module costs a first save or load about a millisecond.

    They last rose when nothing was removed any more that is not proved to be an output, when corrupt files were read
    twice, when states of optimizers that a load could not restore were refused, and with the history of a run, which a
    load by path shares with the directory of the checkpoint, and when all ranks got the error of a wrong
    argument of one of them. That of a load fell by 39 when it ceased to import the code of saves and removals.
    """
    saved, loaded = first_use["save"], first_use["load"]
    assert not {name for name in loaded if name.startswith("torch.distributed.checkpoint")}
    assert len(modules_of_rankless(saved)) <= 204
    assert len(modules_of_rankless(loaded)) <= 204


def test_a_save_without_generators_does_not_import_those_of_numpy(first_use: dict[str, Any]) -> None:
    """They take 2 MB."""
    assert not {name for name in first_use["bare"] if name.startswith("numpy.random")}


def test_a_save_and_a_load_make_dataclasses_of_public_types_only(first_use: dict[str, Any]) -> None:
    """A dataclass takes 0.5 ms to make, a Struct of msgspec 0.02 ms. ``AnyOf`` is what ``|`` of policies returns."""
    assert {*first_use["dataclasses"]} <= {*read_modules(), "AnyOf"}


def test_a_save_and_a_load_run_few_modules_and_functions(first_use: dict[str, Any]) -> None:
    """These bounds only fall, unless a promise needs more: they are what a reader of a save or a load has to know.

    Those of a load last rose when code of the caller's objects that fails in a load was named, when states that share
    memory were given no values that differ, when a file that was replaced was told from one that was read wrongly, and
    when tensors were named that a model's own ``state_dict`` leaves out.
    Both last rose with the history of a run, when all ranks got the error of a wrong argument of one of them, and when
    the layout of a run became an object that is asked, instead of a question about the path in each function. Both
    last rose when the history and the journal left the folders that frameworks list, and that of a load when
    checkpoints could be edited, and by one function when rank 0 kept the CRCs of all ranks as columns. Both
    rose last when long files were divided: claims and the stored history, removals and displaced checkpoints, and a
    restore of models, of optimizers and of the rest.
    """
    (save_modules, save_functions), (load_modules, load_functions) = first_use["ran"]
    assert save_modules <= 124
    assert save_functions <= 574
    assert load_modules <= 127
    assert load_functions <= 601


def test_importing_rankless_imports_no_other_module_of_it() -> None:
    """The public names are imported when first used. CPython imports 29 other modules; versions differ a little."""
    code = "import sys; before = set(sys.modules); import rankless; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = done.stdout.split()
    assert {name for name in names if name.startswith("rankless")} == {"rankless"}
    assert len(names) <= 40


#: Lightning has strategies of the same names for its Trainer and for Fabric, which are public here too.
LIGHTNING_NAMES = {"DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "SingleDeviceStrategy"}


def test_a_class_name_is_used_once() -> None:
    names = Counter(node.name for file in FILES for node in parse(file).body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == LIGHTNING_NAMES


def test_what_docstrings_refer_to_exists() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for folder in ("src", "tests", "benchmarks", "campaigns")
        for file in (ROOT / folder).rglob("*.py")
        for match in re.finditer(
            r":(?:mod|class|func|meth|data|attr):`(?:[^`<]*<)?~?(rankless\.[\w.]+)>?`", file.read_text()
        )
        if not _exists(match[1])
    ]
    assert wrong == []


def _exists(name: str) -> bool:
    """Return whether a dotted name is a module, or what one has; modules are read and not imported."""
    parts, path = name.split(".")[1:], SOURCE
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if parts and (path / f"{parts[0]}.py").is_file():
        path /= f"{parts.pop(0)}.py"
    elif path == SOURCE and parts:
        return hasattr(rankless, parts[0])
    text = path.read_text() if path.is_file() else (path / "__init__.py").read_text()
    return all(re.search(rf"\b{part}\b", text) for part in parts)


def test_every_format_in_the_registry_exists() -> None:
    paths = [path for known in registry.READABLE.values() for path in (known.detect, known.reader)]
    for path in [*paths, *registry.TARGETS.values()]:
        assert callable(registry.load_attribute(path))


#: The text of a statement that imports.
IMPORT = re.compile(r"^\s*(?:from|import)\s[^(\n]*(?:\([^)]*\))?", re.MULTILINE)


def imports_of_tests(file: Path) -> set[str]:
    """Return the imported names that lie in a module with tests."""
    if not any("test_" in statement for statement in IMPORT.findall(file.read_text())):
        return set()  # to parse all files takes seconds
    return {name for name in imports(file) if any(part.startswith("test_") for part in name.split("."))}


@pytest.mark.parametrize("folder", ["tests", "campaigns", "benchmarks"])
def test_nothing_imports_a_module_with_tests(folder: str) -> None:
    """What several tests share is in ``tests/helpers`` or in a ``conftest.py``."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert {str(file): names for file in files if (names := imports_of_tests(file))} == {}
