"""Write ``docs/api.md`` from the code: every name on the pages in ``docs/api``, with its first sentence and signature.

``python docs/make_api.py`` writes it. The modules are parsed, not imported: some need packages that are not installed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rankless.ondisk.data_files import SHARD_SIZE
from rankless.public_names import read_modules

_DOCS = Path(__file__).parent
_SOURCE = _DOCS.parent / "src"

#: The pages in the order of the overview.
_PAGES = [
    *("checkpointer", "saving", "loading", "copying", "components", "inspection", "evaluation", "serving", "retention"),
    *("data", "events", "tracing", "integrations", "errors"),
]

_HEAD = """# API

<!-- written by docs/make_api.py from the code; make docs runs it -->

All names are in `rankless` unless a module is given. Importing it does not import torch. Pass arguments after `*` by
name; `**more` are the fields of `SaveOptions` or `LoadOptions`. The headings lead to all arguments and errors, on the
documentation site (`make docs`); elsewhere, use `help(rankless.restore)`. The commands are in the [CLI
reference](cli.md).
"""

_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def write_overview() -> str:
    """Return the text of ``docs/api.md``."""
    return "\n".join([_HEAD, *("\n".join(_describe_page(page)) for page in _PAGES)])


def _describe_page(page: str) -> Iterator[str]:
    """Yield the heading of a page, its names with a sentence each, and a block with the signatures."""
    lines = (_DOCS / f"api/{page}.md").read_text().splitlines()
    yield f"## [{lines[0].removeprefix('# ')}](api/{page}.md)\n"
    definitions = [
        definition
        for line in lines
        if line.startswith("::: ")
        for definition in _find_definitions(line.removeprefix("::: ").strip())
    ]
    names: dict[str, list[str]] = {}
    for public, node in definitions:
        names.setdefault(_first_sentence(node), []).append(f"`{public}`")
    yield from (f"- {', '.join(alike)}: {sentence}" for sentence, alike in names.items())
    if signatures := [f"{public}{text}" for public, node in definitions if (text := _shorten(_signature(node)))]:
        yield from ("\n```text", *(line for text in signatures for line in _wrap(text)), "```")
    yield ""


def _wrap(signature: str) -> list[str]:
    return textwrap.wrap(signature, 116, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _find_definitions(path: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the public name and the node of a definition, or of all public ones of a module or package."""
    if (_SOURCE / path.replace(".", "/")).is_dir() or (_SOURCE / f"{path.replace('.', '/')}.py").exists():
        for name in _names_of(path):
            yield _name_definition(path, name)
    else:
        module, _, name = path.rpartition(".")
        yield _name_definition(module, name)


def _name_definition(module: str, name: str) -> tuple[str, ast.stmt]:
    public = name if name in _names_of("rankless") and module != "rankless" else f"{module}.{name}"
    if module.startswith(
        ("rankless.colossalai", "rankless.deepspeed", "rankless.lightning", "rankless.nxd")
    ) and not module.endswith(".fabric"):
        public = f"{module.rpartition('.')[0]}.{name}"
    return public, _find_definition(module, name)


@cache
def _parse(module: str) -> ast.Module:
    base = _SOURCE / module.replace(".", "/")
    file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
    return ast.parse(file.read_text())


@cache
def _names_of(module: str) -> list[str]:
    """Return ``__all__`` of a module, or else its public functions and classes."""
    if module == "rankless":
        return list(read_modules())
    for node in _parse(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    names = [node.name for node in _parse(module).body if isinstance(node, _DEFINITIONS)]
    return [name for name in names if not name.startswith("_")]


def _find_definition(module: str, name: str) -> ast.stmt:
    for node in ast.walk(_parse(module)):
        if isinstance(node, _DEFINITIONS) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in [ast.unparse(target) for target in targets]:
            return node
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("rankless")
            and name in [alias.name for alias in node.names]
        ):
            return _find_definition(str(node.module), name)
    raise LookupError(f"{module} does not define {name}, which a page in docs/api names")


def _shorten(signature: str) -> str:
    """Write defaults as a reader needs them: values instead of the constants and calls that give them."""
    signature = re.sub(r"field\(default_factory=\w+\)", "…", signature)
    signature = re.sub(r"field\(default=([^,]+), repr=False\)", r"\1", signature)
    return re.sub(r"=_[A-Z]\w*", "=…", signature.replace("=SHARD_SIZE", f"={SHARD_SIZE!r}"))


def _signature(node: ast.stmt) -> str:
    """Return the parameters without types; for a class, its constructor's, or the fields of a dataclass."""
    if isinstance(node, ast.FunctionDef):
        return f"({_parameters(node.args)})"
    if not isinstance(node, ast.ClassDef):
        return ""
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return f"({_parameters(member.args)})"
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return ""
    fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
    shown = [ast.unparse(field.target) + (f"={ast.unparse(field.value)}" if field.value else "") for field in fields]
    return f"({', '.join(shown)})"


def _parameters(arguments: ast.arguments) -> str:
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        argument.annotation = None
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            variadic.annotation = None
    text = ast.unparse(arguments)
    return re.sub(r"^self(, )?", "", text)


def _first_sentence(node: ast.stmt) -> str:
    """Return the first sentence of a docstring in Markdown."""
    text = (ast.get_docstring(node) or "") if isinstance(node, _DEFINITIONS) else ""
    sentence = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s(?=[A-Z])", sentence)[0].rstrip(":.")
    sentence = re.sub(r":\w+:`~?(?:rankless\.)?([^`]*)`", r"`\1`", sentence).replace("``", "`")
    return f"{sentence}." if sentence else "A constant."


if __name__ == "__main__":
    (_DOCS / "api.md").write_text(write_overview())
