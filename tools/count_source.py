"""Counts what the size and the structure of the sources are judged by, and prints a line for each.

python tools/count_source.py [CHECKOUT]       # default: this one
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a function has, without self and cls."""
    listed = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return sum(one.arg not in ("self", "cls") for one in listed)


def names_in(tree: ast.AST) -> Iterator[str]:
    """The names that are called or decorate."""
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name):
            yield called.id
        if isinstance(node, ast.ClassDef):
            yield from (one.id for one in node.decorator_list if isinstance(one, ast.Name))


def imported(tree: ast.AST, modules: set[str]) -> set[str]:
    """The modules of ours that a module imports anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{one.name}" for one in node.names}
            found |= {one if one in modules else node.module for one in inner}
    return found & modules


def cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """The sets of modules that import one another (strongly connected components, by reachability)."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for module in graph[left.pop()] - seen:
                seen.add(module)
                left.append(module)
        return seen

    below = {module: reached(module) for module in graph}
    inside = [module for module in sorted(graph) if module in below[module]]
    return sorted({tuple(other for other in inside if other in below[one] and one in below[other]) for one in inside})


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    package = root / "src" / "polyrhythm"
    lines: dict[str, int] = {}
    owners: dict[str, set[str]] = defaultdict(set)
    uses: dict[str, int] = defaultdict(int)
    longest, where, private = 0, "", 0
    trees: dict[str, ast.AST] = {}
    for path in sorted(package.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        tree = ast.parse(text)
        lines[name] = text.count("\n")
        dotted = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        trees[dotted.removesuffix(".__init__")] = tree
        for used in names_in(tree):
            uses[used] += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].add(name)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and parameters(node) > longest:
                longest, where = parameters(node), f"{name}:{node.name}"
    for path in [*(root / "tests").rglob("*.py"), *(root / "bench" / "tests").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            reached = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
            private += reached and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    core = {name: count for name, count in lines.items() if not name.startswith("plugins/")}
    several = sorted(name for name, files in owners.items() if len(files) > 1)
    print("lines in all:", sum(lines.values()), "core:", sum(core.values()))
    print("modules:", len(lines), "under 60 lines:", sum(count < 60 for count in lines.values()))
    for used in ("runtime_checkable", "getattr", "hasattr", "isinstance"):
        print(f"{used}:", uses[used])
    circles = cycles({name: imported(tree, set(trees)) - {name} for name, tree in trees.items()})
    print("import cycles:", len(circles), "; ".join(f"{one[0]} and {len(one) - 1} more" for one in circles))
    print("longest parameter list:", longest, where)
    print("class names with several owners:", len(several), ", ".join(several))
    print("private attributes reached from tests:", private)


if __name__ == "__main__":
    main()
