"""The mutants of a source file: pure."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}

#: Calls that write logs and warnings, and calls whose arguments nobody can confuse, or have no order.
_LOGS = frozenset({"log", "logger", "logging", "warnings", "warn", "print"})
_PLAIN = frozenset({"isinstance", "issubclass", "getattr", "setattr", "hasattr", "cast", "field", "max", "min"})


@dataclass(frozen=True)
class Mutant:
    """A change of one expression or statement: lines count from 1, columns are bytes from 0."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    old: str
    new: str

    @property
    def name(self) -> str:
        """The identity of the mutant, unique in one commit."""
        return f"{self.path}:{self.line}:{self.column} {self.kind}: {self.old} -> {self.new}"

    def apply(self, source: str) -> str:
        """Return ``source`` with this change."""
        lines = source.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + self.column
        end = sum(map(len, lines[: self.end_line - 1])) + self.end_column
        data = b"".join(lines)
        return (data[:start] + self.new.encode() + data[end:]).decode()


def draw_mutants(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` different mutants of the files ``sources``, fewer if there are no more.

    Each kind of change is equally probable, so that the many conditions do not crowd out the few swapped arguments.
    """
    kinds: dict[str, list[Mutant]] = {}
    for path, source in sorted(sources.items()):
        for mutant in list_mutants(path, source):
            kinds.setdefault(mutant.kind, []).append(mutant)
    generator = random.Random(seed)
    drawn: list[Mutant] = []
    while kinds and len(drawn) < count:
        kind = generator.choice(sorted(kinds))
        drawn.append(kinds[kind].pop(generator.randrange(len(kinds[kind]))))
        if not kinds[kind]:
            del kinds[kind]
    return drawn


def list_mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, whose code differs from the file's."""
    for node in _list_code(ast.parse(source)):
        for kind, new in _change(node):
            line, column, end_line, end_column = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
            if end_line is not None and end_column is not None:
                yield Mutant(path, line, column, end_line, end_column, kind, ast.unparse(node), new)


def _list_code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements that run, without annotations, texts, logs and the texts of errors."""
    for name, field in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "type_params"}:
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, (ast.expr, ast.stmt)) and not _is_ignored(child):
                yield child
            if isinstance(child, ast.AST) and not _is_ignored(child) and not isinstance(child, ast.Raise):
                yield from _list_code(child)


def _is_ignored(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return ast.unparse(function).partition(".")[0] in _LOGS
    return False


def _change(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield kinds of changes of this node, and its new code. An expression is in parentheses."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in _COMPARISONS:
            yield "comparison", _in_parentheses(ast.Compare(left, [_COMPARISONS[type(operator)]()], right))
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            yield "arithmetic", _in_parentheses(ast.BinOp(left, _OPERATORS[type(operator)](), right))
        case ast.BoolOp(operator, values):
            yield "logic", _in_parentheses(ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values))
        case ast.UnaryOp(ast.Not(), operand):
            yield "not removed", _in_parentheses(operand)
        case ast.Constant(value) if type(value) is int:
            yield "constant", f"({value + 1})"
        case ast.Call(function, arguments) if ast.unparse(function) not in _PLAIN:
            yield from (("arguments", new) for new in _swap_arguments(node, arguments))
        case ast.IfExp(test, body, orelse):
            yield "not added", _in_parentheses(ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse))
        case ast.stmt():
            yield from _change_statement(node)


def _change_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield "return value", "return None"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield "statement", "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement", "pass"


def _swap_arguments(call: ast.Call, arguments: Sequence[ast.expr]) -> Iterator[str]:
    for first in range(len(arguments) - 1):
        before, one, other, after = arguments[:first], arguments[first], arguments[first + 1], arguments[first + 2 :]
        if not isinstance(one, ast.Starred) and not isinstance(other, ast.Starred) and ast.dump(one) != ast.dump(other):
            yield _in_parentheses(ast.Call(call.func, [*before, other, one, *after], call.keywords))


def _in_parentheses(node: ast.expr) -> str:
    return f"({ast.unparse(ast.fix_missing_locations(node))})"
