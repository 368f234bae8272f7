"""Write the options of each command into ``docs/cli.md``, from the commands.

``python docs/make_cli.py`` replaces the blocks after the comments ``<!-- options: COMMAND -->``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankless.cli.commands import LazyCommands

_PAGE = Path(__file__).parent / "cli.md"

#: The page explains these once for all commands.
_COMMON = {"help", "json", "as_json", "tag"}

_BLOCK = re.compile(r"(<!-- options: (\S+) -->\n)(?:```text\n.*?```\n)?", re.DOTALL)

#: Columns for the options, and for a line.
_INDENT, _WIDTH = 30, 116


def fill_options(page: str) -> str:
    """Return the page with the options of now."""
    commands: Any = LazyCommands()
    return _BLOCK.sub(lambda match: f"{match[1]}```text\n{_list_options(commands[match[2]])}\n```\n", page)


def _list_options(command: Any) -> str:
    options = (option for option in command.params if option.param_type_name == "option")
    return "\n".join(line for option in options if option.name not in _COMMON for line in _describe_option(option))


def _describe_option(option: Any) -> Iterator[str]:
    """Yield the lines of an option: its names, its value, and its help with the default."""
    names = " / ".join(", ".join(sorted(group, key=len)) for group in (option.opts, option.secondary_opts) if group)
    value = "" if option.is_flag else f" {option.metavar or 'VALUE'}"
    remark = " [required]" if option.required else ""
    default = option.default
    if option.secondary_opts and isinstance(default, bool):
        default = (option.opts if default else option.secondary_opts)[0]
    if not isinstance(default, bool | None) and default not in {"", ()}:
        remark = f" [default: {default}]"
    name = f"{names}{value}".ljust(_INDENT - 1) + " "
    indent = " " * _INDENT
    lines = textwrap.wrap((option.help or "") + remark, _WIDTH - _INDENT, break_on_hyphens=False)
    if len(name) > _INDENT:
        yield name.rstrip()
        yield from (indent + line for line in lines)
    else:
        yield name + lines[0]
        yield from (indent + line for line in lines[1:])


if __name__ == "__main__":
    _PAGE.write_text(fill_options(_PAGE.read_text()))
