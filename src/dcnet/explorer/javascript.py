"""A formula in JavaScript, translated from its own syntax tree.

Locals get a `$` in front, so that a name such as `new`, or `m` itself, cannot mean something else there.
"""

import ast
import inspect

from dcnet.formulas import Formula, m

POSSIBLE = "its arguments, numbers, + - * / **, comparisons, & | ^ ~, functions of m, assignments and a returned tuple"

_BINARY = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
_UNARY = {ast.USub: "-", ast.UAdd: "+", ast.Invert: "!"}  # ~ is for conditions, in torch as here
_COMPARISON = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


def to_javascript(formula: Formula) -> str:
    """Return the formula as a JavaScript function of its arguments, in their order, that returns [value, slope, …]."""
    return _Translation(formula).text()


def syntax_tree(formula: Formula) -> ast.FunctionDef:
    """Return the formula's definition, with the line numbers of its file."""
    code = formula.function.__code__
    where = f"{formula.kind} {formula.name!r} cannot be translated: "
    unreadable = (
        f"{where}its source cannot be read, as it was defined in {code.co_filename}; define it in a file or a notebook"
    )
    try:
        tree = ast.parse("".join(inspect.findsource(code)[0]))
    except (OSError, SyntaxError) as error:
        raise ValueError(unreadable) from error
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
            continue
        first = node.decorator_list[0] if node.decorator_list else node
        if first.lineno == code.co_firstlineno:
            return node
    if code.co_filename == "<string>":  # of exec; what Python 3.13 knows by this name is the code of `python -c`
        raise ValueError(unreadable)
    raise ValueError(f"{where}line {code.co_firstlineno} of {code.co_filename} has no 'def {code.co_name}' (any more)")


class _Translation:
    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        self.tree = syntax_tree(formula)
        self.arguments = [argument.arg for argument in self.tree.args.posonlyargs + self.tree.args.args]
        stored = [
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self.locals = [name for name in dict.fromkeys(stored) if name not in self.arguments]

    def text(self) -> str:
        lines = [f"let {', '.join(map(_local, self.locals))};"] if self.locals else []
        lines += [line for statement in self.tree.body if (line := self.statement(statement))]
        return (
            f"function ({', '.join(map(_local, self.arguments))}) {{\n" + "".join(f"  {line}\n" for line in lines) + "}"
        )

    def statement(self, node: ast.stmt) -> str:
        match node:
            case (
                ast.Expr(value=ast.Constant()) | ast.Pass() | ast.AnnAssign(value=None)
            ):  # the docstring; nothing happens
                return ""
            case ast.Assign(targets=targets, value=value):
                return " = ".join([*map(self.target, targets), self.expression(value)]) + ";"
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                return f"{_local(name)} = {self.expression(value)};"
            case ast.Return(value=ast.expr() as value):
                return f"return {self.expression(value)};"
        raise self.refusal(node)

    def target(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return _local(name)
            case ast.Tuple(elts=elements):
                return f"[{', '.join(map(self.target, elements))}]"
        raise self.refusal(node)

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool(value)):
                return str(value).lower()
            case ast.Constant(value=int() | float() as value):
                return "Infinity" if value == float("inf") else repr(value)
            case ast.Name(id=name) if name in self.arguments or name in self.locals:
                return _local(name)
            case ast.Tuple(elts=elements):
                return f"[{', '.join(map(self.expression, elements))}]"
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
                return f"({self.expression(left)} {_BINARY[type(operator)]} {self.expression(right)})"
            case ast.UnaryOp(op=operator, operand=operand) if type(operator) in _UNARY:
                return f"({_UNARY[type(operator)]}{self.expression(operand)})"
            case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARISON:
                return f"({self.expression(left)} {_COMPARISON[type(operator)]} {self.expression(right)})"
            case ast.NamedExpr(target=target, value=value):
                return f"({self.target(target)} = {self.expression(value)})"
            case ast.Attribute(value=ast.Name(id="m"), attr=name) if (
                name in m.NAMES and "m" not in self.arguments + self.locals
            ):
                return f"m.{name}"
            case ast.Call(func=function, args=given, keywords=keywords):
                values = map(self.expression, [*given, *self.by_name(node, keywords)])
                return f"{self.expression(function)}({', '.join(values)})"
        raise self.refusal(node)

    def by_name(self, call: ast.Call, keywords: list[ast.keyword]) -> list[ast.expr]:
        """Return the arguments a call of m gives by name, in the order of the positions."""
        if not keywords:
            return []
        if not isinstance(call.func, ast.Attribute) or any(keyword.arg is None for keyword in keywords):
            raise self.refusal(call)
        names = list(inspect.signature(getattr(m, call.func.attr)).parameters)[len(call.args) :]
        given = {keyword.arg: keyword.value for keyword in keywords}
        return [given[name] for name in names]

    def refusal(self, node: ast.expr | ast.stmt) -> ValueError:
        formula = self.formula
        return ValueError(
            f"{formula.kind} {formula.name!r} cannot be translated: {ast.unparse(node)!r} "
            f"({type(node).__name__}) at line {node.lineno} "
            f"of {formula.function.__code__.co_filename}; possible: {POSSIBLE}",
        )


def _local(name: str) -> str:
    return f"${name}"
