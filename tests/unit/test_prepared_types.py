"""Tests that msgspec knows each type before threads decode it: two first uses at once can crash the process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import rankless

#: Six threads decode a type for the first time at once, for many types. ``{decorator}`` is what is done before.
SCRIPT = """
import sys, threading
from typing import Annotated
import msgspec
from rankless.process.prepared_types import prepared

def decode(kind, start):
    start.wait()
    msgspec.json.decode(b'{{"f1": 1.0}}', type=kind)

sys.setswitchinterval(1e-6)
number = Annotated[float, msgspec.Meta(ge=0)]
for _ in range(300):
    fields = [(f"f{{at}}", number if at % 2 else dict[str, float | None], 0.0 if at % 2 else {{}}) for at in range(25)]
    kind, start = {decorator}(msgspec.defstruct("Kind", fields)), threading.Barrier(6)
    threads = [threading.Thread(target=decode, args=(kind, start)) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def decoded_names(tree: ast.Module) -> set[str]:
    """Return the names in the types that a module decodes or converts to."""
    types: list[ast.expr] = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        function = ast.unparse(call.func)
        if function.endswith(".decode"):
            types += [option.value for option in call.keywords if option.arg == "type"]
        elif function in {"msgspec.convert", "decode_checked", "_check_type"}:
            types += call.args[1:2]
    return {node.id for kind in types for node in ast.walk(kind) if isinstance(node, ast.Name)}


def test_each_type_that_is_decoded_is_prepared() -> None:
    modules = [ast.parse(file.read_text()) for file in Path(rankless.__file__).parent.rglob("*.py")]
    names = set[str]().union(*map(decoded_names, modules))
    classes = [node for tree in modules for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    decoded = [
        node
        for node in classes
        if node.name in names
        and any(ast.unparse(base) in {"msgspec.Struct", "Struct", "NamedTuple"} for base in node.bases)
    ]
    assert len(decoded) > 30
    assert [node.name for node in decoded if "prepared" not in map(ast.unparse, node.decorator_list)] == []


def test_a_prepared_type_may_be_decoded_by_several_threads_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(decorator="prepared")], check=False)
    assert done.returncode == 0
