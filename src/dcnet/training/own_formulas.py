"""A user's formulas belong to a run: their source lies in its folder as `formulas.py`.

It is executed only when that is asked for.
"""

import ast
import hashlib
import inspect
import textwrap
import types
import warnings
from pathlib import Path

from dcnet.formulas import Formula, Learnable, angulars, look_up, magnitudes
from dcnet.training.recipe import Recipe
from dcnet.util.files import write_atomically

FILE = "formulas.py"
_MARK = "# sha256 of all that follows: "
_HEAD = (
    '"""The formulas of one\'s own that this run was trained with; '
    'dcnet checks them, and executes them only when asked to."""\n\n'
)
_HEAD += "import dcnet\nfrom dcnet import at_least, learnable, m, positive\n"


class MissingFormula(ValueError):
    """A run was trained with a formula that is not known here, or that is another one here."""


def keep_formulas(folder: Path, recipe: Recipe) -> None:
    """Write the source of the recipe's formulas into the folder, of those that do not come with dcnet.

    Check those that are there already.
    """
    own = [formula for formula in _of(recipe) if not _comes_with_dcnet(formula)]
    if not own:
        return
    if (folder / FILE).is_file():
        check_formulas(folder, recipe)
        return
    try:
        text = "".join([_HEAD, *(f"\n\n{ast.unparse(_definition(formula))}\n" for formula in own)])
    except (OSError, TypeError, SyntaxError) as error:  # typed into an interpreter, for one
        names = ", ".join(formula.name for formula in own)
        warnings.warn(
            f"{folder} gets no copy of {names}, as the source cannot be read ({error}): keep it, to load the run again",
            stacklevel=2,
        )
        return
    write_atomically(folder / FILE, f"{_MARK}{_digest(text)}\n{text}".encode())


def check_formulas(folder: Path, recipe: Recipe) -> None:
    """Raise where one of the recipe's formulas is not known here, or is not the one that the run was trained with."""
    stored = _stored(folder)
    hint = "Give the file that defines it: --formulas FILE, or import it in Python. "
    hint += f"The folder has no {FILE}, a copy of it"
    if stored:
        hint = (
            "Give the file that defines it: --formulas FILE. Or, if you trust the folder, execute the copy that "
            f"it has, {folder / FILE}: "
            "--trust-formulas (in Python: dcnet.load(folder, trust_formulas=True))"
        )
    for kind, name in _names(recipe):
        known = magnitudes() if kind == "magnitude" else angulars()
        kept = next((node for node in stored if node.name == name and _kind(node) == kind), None)
        if name not in known:
            raise MissingFormula(
                f"{folder} was trained with the {kind} function {name!r}, which is not known here. {hint}"
            )
        if kept is not None and not _same(kept, known[name]):
            raise MissingFormula(
                f"{folder} was trained with another {kind} function {name!r} than the one known here. {hint}"
            )


def trust_formulas(folder: Path) -> None:
    """Execute the folder's own formulas, which registers them; raise where they are not what training wrote."""
    for node in _stored(folder):
        known = (magnitudes() if _kind(node) == "magnitude" else angulars()).get(node.name)
        if known is not None and _same(node, known):
            continue
        if known is not None:
            raise ValueError(
                f"{folder / FILE} defines the {_kind(node)} function {node.name!r}, but another one of that name "
                "is known here"
            )
        module = types.ModuleType("formulas_of_a_run")
        exec(_HEAD, module.__dict__)
        exec(compile(ast.Module([node], []), str((folder / FILE).resolve()), "exec"), module.__dict__)


def _stored(folder: Path) -> list[ast.FunctionDef]:
    """Return the definitions in the folder, without executing them.

    Raise where the file was changed after training had written it.
    """
    path = folder / FILE
    if not path.is_file():
        return []
    try:
        mark, _, text = path.read_text(encoding="utf-8").partition("\n")
        tree = ast.parse(f"\n{text}")  # with the numbers that the lines have in the file
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it, and give the formulas by --formulas FILE") from error
    if mark != f"{_MARK}{_digest(text)}":
        raise ValueError(
            f"{path} was changed after training had written it, as its sha256 says; remove it, and give the "
            "formulas by --formulas FILE"
        )
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _names(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the kinds and names of the recipe's formulas, known or not."""
    if recipe.magnitude is None:
        return []
    return [
        (kind, spec.partition(":")[0].strip())
        for kind, spec in (("magnitude", recipe.magnitude), ("angular", recipe.angular))
    ]


def _of(recipe: Recipe) -> list[Formula]:
    return [look_up(kind, name) for kind, name in _names(recipe)]


def _comes_with_dcnet(formula: Formula) -> bool:
    return (formula.function.__module__ or "").startswith("dcnet.formulas.")


def _definition(formula: Formula) -> ast.FunctionDef:
    """Return the function by itself.

    Decorator, annotations and defaults in words that need nothing of the file it comes from.
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
            stacklevel=4,
        )
        return True
    return _computation(stored) == _computation(here)


def _computation(node: ast.FunctionDef) -> str:
    """Return the definition without its words: no docstring, and formatted in one way."""
    body = node.body
    if (
        body
        and isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    return ast.dump(ast.FunctionDef(node.name, node.args, body, node.decorator_list, None))
