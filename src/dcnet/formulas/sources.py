"""The source of a user's formulas, to be kept beside weights: written, compared, and executed only when asked to."""

import ast
import hashlib
import inspect
import linecache
import textwrap
import types
import warnings
from collections.abc import Iterable, Sequence

from dcnet.formulas.catalogue import Formula, Learnable, angulars, look_up, magnitudes

FILE = "formulas.py"
Name = tuple[str, str]  # "magnitude" or "angular", and a formula's name
_MARK = "# sha256 of all that follows: "
_HEAD = (
    '"""The formulas of one\'s own that this run was trained with; '
    'dcnet checks them, and executes them only when asked to."""\n\n'
)
_HEAD += "import dcnet\nfrom dcnet.formulas import at_least, learnable, m, positive\n"


class MissingFormula(ValueError):
    """A network has a formula that is not registered here, or differs from the one registered here."""


def formula_names(operators: Iterable[tuple[str, str]]) -> list[Name]:
    """Return the formulas, known or not, of operators given as a magnitude and an angular, with parameters or not."""
    found = [(kind, spec) for pair in operators for kind, spec in zip(("magnitude", "angular"), pair, strict=True)]
    return list(dict.fromkeys((kind, spec.partition(":")[0].strip()) for kind, spec in found))


def source_of(names: Sequence[Name], place: object) -> str | None:
    """Return the source of those formulas that do not come with dcnet; None where there are none.

    Where a source cannot be read, warn that the place gets no copy, and return None.
    """
    own = [formula for kind, name in names if not _comes_with_dcnet(formula := look_up(kind, name))]
    if not own:
        return None
    try:
        text = "".join([_HEAD, *(f"\n\n{ast.unparse(_definition(formula))}\n" for formula in own)])
    except (OSError, TypeError, SyntaxError) as error:  # typed into an interpreter, for one
        missing = ", ".join(formula.name for formula in own)
        warnings.warn(
            f"{place} gets no copy of {missing}, as the source cannot be read ({error}): keep it, to load it again",
            stacklevel=3,
        )
        return None
    return f"{_MARK}{_digest(text)}\n{text}"


def check_source(text: str | None, names: Sequence[Name], place: object, copy: object, made: str = "trained") -> None:
    """Raise where a formula is not known here, or is not the one in the source that was kept.

    place: what was made with them, as errors name it. copy: where the source lies, for errors too.
    """
    stored = [] if text is None else _definitions(text, copy)
    hint = "Give the file that defines it: --formulas FILE, or import it in Python. "
    hint += f"{'The folder' if made == 'trained' else 'The file'} has no {FILE}, a copy of it"
    if stored:
        hint = (
            "Give the file that defines it: --formulas FILE, or import it in Python. Or, if you trust its origin, "
            f"execute the copy in {copy}: --trust-formulas (in Python: trust_formulas=True)"
        )
    for kind, name in names:
        known = magnitudes() if kind == "magnitude" else angulars()
        kept = next((node for node in stored if node.name == name and _kind(node) == kind), None)
        if name not in known:
            raise MissingFormula(
                f"{place} was {made} with the {kind} function {name!r}, which is not known here. {hint}"
            )
        if kept is not None and not _same(kept, known[name]):
            raise MissingFormula(
                f"{place} was {made} with another {kind} function {name!r} than the one known here. {hint}"
            )


def execute_source(text: str, place: object) -> None:
    """Execute the source that was kept, which registers its formulas; raise where it was changed since."""
    for node in _definitions(text, place):
        known = (magnitudes() if _kind(node) == "magnitude" else angulars()).get(node.name)
        if known is not None and _same(node, known):
            continue
        if known is not None:
            raise ValueError(
                f"{place} defines the {_kind(node)} function {node.name!r}, but another one of that name is known here"
            )
        file = f"<{place}, {_digest(text)[:12]}>"
        # for all who read the source of a function again, such as Triton: where it came from may be gone by then
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        module = types.ModuleType("formulas_of_a_run")
        exec(_HEAD, module.__dict__)
        exec(compile(ast.Module([node], []), file, "exec"), module.__dict__)


def _definitions(text: str, place: object) -> list[ast.FunctionDef]:
    """Return the definitions in the source, without executing them; raise where it was changed after it was written."""
    try:
        mark, _, body = text.partition("\n")
        tree = ast.parse(f"\n{body}")  # with the numbers that the lines have in the file
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{place} is damaged: {error}; remove it, and give the formulas by --formulas FILE") from error
    if mark != f"{_MARK}{_digest(body)}":
        raise ValueError(
            f"{place} was changed after training had written it, as its sha256 says; remove it, and give the "
            "formulas by --formulas FILE"
        )
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _comes_with_dcnet(formula: Formula) -> bool:
    return (formula.function.__module__ or "").startswith("dcnet.formulas.")


def _definition(formula: Formula) -> ast.FunctionDef:
    """Return the definition of the function, in a form that does not depend on its file.

    Decorator, annotations and defaults are rewritten so that they need nothing else from there.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(formula.function)))
    node = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == formula.name), None)
    if node is None:
        raise OSError(f"the file that {formula.name} came from has changed since")
    bounded = ", ".join(["bounded=True"] * (formula.kind == "magnitude" and formula.bounded))
    node.decorator_list = [
        ast.parse(f"dcnet.{formula.kind}({bounded})" if bounded else f"dcnet.{formula.kind}", mode="eval").body
    ]
    node.returns = None
    arguments = [*node.args.posonlyargs, *node.args.args]
    for argument in arguments:
        parameter = formula.parameters.get(argument.arg)
        argument.annotation = None if parameter is None else _annotation(parameter.range)
    node.args.defaults = [ast.Constant(parameter.default) for parameter in formula.parameters.values()]
    return ast.fix_missing_locations(node)


def _annotation(bounds: object) -> ast.expr | None:
    """Return a parameter's range as its annotation says it."""
    low, is_open = getattr(bounds, "low", float("-inf")), getattr(bounds, "open", False)
    if isinstance(bounds, Learnable):
        least = "" if is_open else f", least={low!r}"
        text = f"learnable(start={bounds.start!r}, floor={bounds.floor!r}{least})"
    elif low == float("-inf"):
        return None
    else:
        text = "positive" if is_open else f"at_least({low!r})"
    return ast.parse(text, mode="eval").body


def _kind(node: ast.FunctionDef) -> str:
    """Return which registration the stored definition has."""
    return (
        "magnitude" if node.decorator_list and "dcnet.magnitude" in ast.unparse(node.decorator_list[0]) else "angular"
    )


def _same(stored: ast.FunctionDef, known: Formula) -> bool:
    """Return whether the formula known here computes what the stored one does."""
    try:
        here = _definition(known)
    except (OSError, TypeError, SyntaxError) as error:
        warnings.warn(
            f"whether {known.name} is the formula of the run cannot be checked, as its source cannot be read: {error}",
            stacklevel=5,
        )
        return True
    return _computation(stored) == _computation(here)


def _computation(node: ast.FunctionDef) -> str:
    """Return what a definition computes as text, without docstring and formatting."""
    body = node.body
    if (
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    return ast.dump(ast.FunctionDef(node.name, node.args, body, node.decorator_list, None))
