"""The source tree, for the house tests."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "burnish"
FILES = sorted(PACKAGE.rglob("*.py"))


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(parsed(file)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def num_code_lines(file: Path) -> int:
    """Lines that hold code: neither blank, nor only a comment or a docstring."""
    nodes = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Expr)]
    texts = [node for node in nodes if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    said = {number for node in texts for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = file.read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and line.strip()[0] != "#" and n not in said for n, line in enumerate(lines, 1))


def unfinished(text: str) -> list[str]:
    """Words that mark work left undone."""
    return re.findall(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError|NotImplemented)\b", text)


def free_unpickling(text: str) -> list[str]:
    """Calls that would run code a file holds."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if _unpickles(call)]


def _unpickles(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "torch.load":
        return not any(
            keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in call.keywords
        )
    return name.rpartition(".")[0] in ("pickle", "dill", "cloudpickle", "marshal") and "load" in name
