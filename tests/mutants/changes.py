"""Mutants of a module's text: operators, numbers, conditions, returned values, statements and order of arguments."""

import ast
import itertools
import re

OPERATORS = {  # with what replaces them
    **{"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"], "==": ["!="], "!=": ["=="]},
    **{"is": ["is not"], "is not": ["is"], "in": ["not in"], "not in": ["in"], "and": ["or"], "or": ["and"]},
    **{"+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "//": ["*"], "%": ["+"], "**": ["*"], "@": ["*"]},
    **{"&": ["|"], "|": ["&"], "^": ["&"], "<<": [">>"], ">>": ["<<"]},
}
OPERATOR = re.compile(r"\bis not\b|\bnot in\b|\b(is|in|and|or)\b|<<|>>|//|\*\*|[<>=!]=|[-+*/%@&|^<>]")
EXCLUDED = {  # parts of nodes that stay
    ast.FunctionDef: ("args", "returns", "decorator_list"),
    ast.Lambda: ("args",),
    ast.ClassDef: ("bases", "decorator_list"),
    ast.AnnAssign: ("annotation",),
    ast.Raise: ("exc", "cause"),
    ast.JoinedStr: ("values",),
}


class Mutants(list):
    """Mutants of a module: line, whether it is a constant of the module, description, text with the same lines."""

    def __init__(self, text: bytes):
        self.text = text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        for statement in ast.parse(text).body:
            constant = isinstance(statement, ast.Assign)
            self.visit(statement, constant, constant)

    def visit(self, node: ast.AST, constant: bool, inside: bool):
        """Add the mutants of a node and its descendants that are inside of a function or constant."""
        for start, end, new in self.changes(node) if inside else ():
            text = self.text[:start] + new.encode() + self.text[end:]
            line = self.text.count(b"\n", 0, start)
            change = " -> ".join(source.splitlines()[line].strip().decode() for source in (self.text, text))
            try:
                compile(text, "mutant", "exec")
            except SyntaxError:
                continue
            self.append((line + 1, constant, change, text))
        inside = inside or isinstance(node, ast.FunctionDef | ast.Lambda)
        for name, value in ast.iter_fields(node):
            if name not in EXCLUDED.get(type(node), ()):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child, constant, inside)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first byte of a node and the one after its last."""
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def changes(self, node: ast.AST):
        """Yield the first byte, the end and the replacement of each change."""
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from self.operators([left, *others])
            case ast.BoolOp(values=values):
                yield from self.operators(values)
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                yield from self.operators([left, right])
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self.span(node)[0], self.span(operand)[0], ""
            case ast.Constant(value=bool(value)):
                yield *self.span(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                yield *self.span(node), str(value + 1)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
                start, end = self.span(test)
                yield start, end, f"(not ({self.text[start:end].decode()}))"
            case ast.Return(value=ast.expr()):
                start, end = self.span(node)
                yield start, end, f"return None if True else ({self.text[start + 6 : end].decode()})"
            case ast.Break() | ast.Continue():
                yield *self.span(node), "continue" if isinstance(node, ast.Break) else "break"
            case ast.Call(args=[first, ast.expr() as second, *_]) if not isinstance(second, ast.Starred):
                (start, middle), (begin, end) = self.span(first), self.span(second)
                yield start, end, (self.text[begin:end] + self.text[middle:begin] + self.text[start:middle]).decode()
        match node:  # statements that can be removed; the compiler still sees their names
            case (
                ast.AugAssign()
                | ast.Raise()
                | ast.Delete()
                | ast.Expr(value=ast.Call())
                | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            ):
                yield *self.span(node), f"if False: {self.text[slice(*self.span(node))].decode()}"

    def operators(self, operands: list[ast.expr]):
        """Yield the changes of the operators between operands."""
        for left, right in itertools.pairwise(operands):
            start, end = self.span(left)[1], self.span(right)[0]
            match = OPERATOR.search(self.text[start:end].decode())
            for new in OPERATORS[match[0]]:
                yield start + match.start(), start + match.end(), new
