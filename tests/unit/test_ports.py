"""Tests that tests, campaigns, benchmarks and examples bind a port when they choose it.

A port that was found free and is bound later may be taken in between. Scripts in strings count as well.
"""

import ast
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns.common.reserved_port import reserve_port

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests", "campaigns", "benchmarks", "examples")

#: Functions of other packages that return a port which was free.
FINDERS = {"find_free_network_port", "find_free_port", "find_port", "get_free_port"}

#: What chooses a port has one of these words: to parse the strings of all files takes seconds.
WORDS = {"TCPStore", "socket", "tcp://", *FINDERS}

#: Methods of a socket with which a port is found.
FINDING = {"bind", "getsockname", "setsockopt"}

#: Modules whose ranks are on hosts with networks of their own, where no other process takes a port.
ON_HOSTS_OF_THEIR_OWN = {"benchmarks/several_hosts.py", "campaigns/hosts/scenes/saves.py", "campaigns/tier/ranks.py"}


def parse(code: str) -> Iterator[ast.Module]:
    """Yield the code and, as far as they are Python, the strings in it."""
    tree = ast.parse(code)
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            try:
                yield ast.parse(node.value)
            except SyntaxError:
                continue


def name_of(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def is_risky_call(call: ast.Call) -> bool:
    """Whether it asks for a port that was free, or serves a store at another port than 0."""
    if name_of(call.func) != "TCPStore":
        return name_of(call.func) in FINDERS
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    port = ast.unparse(call.args[1]) if len(call.args) > 1 else options.get("port")
    return options.get("is_master") != "False" and (port, options.get("is_master")) != ("0", "True")


def is_risky_block(block: ast.With) -> bool:
    """Whether a socket is bound only to learn its port: it is closed before its number is used."""
    for item in block.items:
        if item.optional_vars is None or "socket" not in ast.unparse(item.context_expr):
            continue
        name = ast.unparse(item.optional_vars)
        nodes = [node for statement in block.body for node in ast.walk(statement)]
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == name}
        is_passed_on = any(
            isinstance(node, ast.Call) and name in map(ast.unparse, ast.walk(ast.Tuple(node.args, ast.Load())))
            for node in nodes
        )
        if (
            "getsockname" in used <= FINDING
            and not is_passed_on
            and not any(isinstance(node, ast.Yield) for node in nodes)
        ):
            return True
    return False


def find_chosen_ports(code: str) -> list[str]:
    """Return the expressions and blocks that choose a port and do not hold it."""
    if not any(word in code for word in WORDS):
        return []
    found = []
    for tree in parse(code):
        for node in ast.walk(tree):
            if (isinstance(node, ast.Call) and is_risky_call(node)) or (
                isinstance(node, ast.With) and is_risky_block(node)
            ):
                found.append(ast.unparse(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tcp://"):
                found.append(node.value)
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_port_is_held_from_the_moment_when_it_is_chosen(folder: str) -> None:
    files = {file.relative_to(ROOT).as_posix(): file for file in (ROOT / folder).rglob("*.py")}
    files = {name: file for name, file in files.items() if name not in ON_HOSTS_OF_THEIR_OWN and file != Path(__file__)}
    assert {name: found for name, file in files.items() if (found := find_chosen_ports(file.read_text()))} == {}


@pytest.mark.parametrize(
    "code",
    [
        'port = dist.TCPStore("127.0.0.1", 0, is_master=True).port\nTCPStore("127.0.0.1", port, 2, rank == 0)',
        "with socket.create_server(('', 0)) as free:\n    port = free.getsockname()[1]",
        "with socket.socket() as s:\n    s.bind(('', 0))\n    port = s.getsockname()[1]\nserve(port)",
        "port = get_free_port()",
        "init_process_group('gloo', init_method=f'tcp://{address}:29500')",
        "SCRIPT = 'import torch\\nstore = TCPStore(address, 29500, is_master=rank == 0)'",
    ],
)
def test_a_port_that_is_chosen_and_bound_later_is_found(code: str) -> None:
    assert find_chosen_ports(code)


@pytest.mark.parametrize(
    "code",
    [
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\nstart(store.port)",
        "store = TCPStore('127.0.0.1', port, is_master=False)",
        "with socket.create_server(('', 0)) as server:\n    start(server.getsockname()[1])\n    server.accept()",
    ],
)
def test_a_port_that_is_held_is_not_found(code: str) -> None:
    assert not find_chosen_ports(code)


def test_a_reserved_port_is_for_the_server_that_is_given_its_number() -> None:
    with reserve_port() as port:
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(500)]
        assert port not in {other.getsockname()[1] for other in others}
        for _ in range(2):  # a server may be started again
            with (
                socket.create_server(("127.0.0.1", port)) as server,
                socket.create_connection(("127.0.0.1", port)) as client,
            ):
                accepted, _ = server.accept()
                accepted.close()
                assert client.recv(1) == b""
        for other in others:
            other.close()
