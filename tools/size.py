"""Count the lines of `ops` by part, and write the table into ARCHITECTURE.md: python tools/size.py."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "src" / "dcnet" / "ops"
BEGIN, END = "<!-- size: begin -->", "<!-- size: end -->"
# Pattern of a part's files, its name, what it is for. A file belongs to the first part that has a pattern for it.
PARTS = (
    (
        r"(reference|composite)\.py",
        "`reference`, `composite`",
        "what all others are checked against; ordinary operations",
    ),
    (
        r"(api|dispatch|flops|documentation|activations|__init__)\.py",
        "`api`, `dispatch`, `flops`, `documentation`, `activations`",
        "the public functions, the choice, what follows a layer",
    ),
    (
        r"cpu/depthwise\.py|fused/depthwise_plan\.py|fused/kernels/depthwise\.py",
        "depthwise: `cpu/depthwise`, `fused/depthwise_plan`, `kernels/depthwise`",
        "layers whose norms are as large as their output",
    ),
    (r"cpu/native.*", "`cpu/native*`", "the passes of `cpu/` compiled"),
    (
        r"cpu/.*",
        "`cpu/` but for these",
        "PyTorch's operations in few passes: without a compiler, in float64 and bfloat16, on small maps",
    ),
    (r"fused/(kernels/.*|triton_math.*)", "`fused/kernels`, `triton_math`, `triton_math16`", "what runs on the GPU"),
    (
        r"fused/((host|native|first_use|compilers|compile_worker)\.py|cpp/.*|launch\..*)",
        "`fused/host`, `native`, `first_use`, `compile*`, `cpp/`, `launch.*`",
        "less time of the host for each layer",
    ),
    (r"fused/.*", "`fused/` but for these", "plans, launches, autograd, the operators of compiled graphs"),
    (r".*", "`checks`, `geometry`, `norms`, `operator`, `mean_norm`, `post_ops`, `inputs`", "the nouns"),
)
_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of_python(text: str) -> int:
    """Return how many lines are code: neither blank nor a comment nor a docstring."""
    documented = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            documented |= set(range(body[0].lineno, (body[0].end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {line for t in tokens if t.type not in _NO_CODE for line in range(t.start[0], t.end[0] + 1)}
    return len(code - documented)


def lines_of_c(text: str) -> int:
    """Return how many lines are neither blank nor a comment."""
    without = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.split("//")[0].strip()) for line in without.splitlines())


def table() -> str:
    """Return the table of ARCHITECTURE.md."""
    counts = {name: [0, 0, 0, 0] for name in (*(name for _, name, _ in PARTS), "all")}
    for path in sorted(OPS.rglob("*")):
        if path.suffix not in (".py", ".c", ".h", ".cpp"):
            continue
        file, text = path.relative_to(OPS).as_posix(), path.read_text(encoding="utf-8")
        part = next(name for pattern, name, _ in PARTS if re.fullmatch(pattern, file))
        at, code = (0, lines_of_python(text)) if path.suffix == ".py" else (2, lines_of_c(text))
        for name in (part, "all"):
            counts[name][at] += len(text.splitlines())
            counts[name][at + 1] += code
    rows = ["| part of `ops` | Python | C, C++ | what it is for |", "|---|---|---|---|"]
    reasons = {name: reason for _, name, reason in PARTS}
    for name, (python, python_code, c, c_code) in counts.items():
        rows.append(f"| {name} | {_shown(python, python_code)} | {_shown(c, c_code)} | {reasons.get(name, '')} |")
    return "\n".join(rows)


def _shown(lines: int, code: int) -> str:
    return f"{lines:,} ({code:,})" if lines else ""


def main() -> None:
    page = ROOT / "ARCHITECTURE.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
