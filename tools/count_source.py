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


#: What begins with an underscore and is documented all the same: of named tuples, and `os._exit`.
_DOCUMENTED = {"_asdict", "_exit", "_fields", "_make", "_replace"}


def private_reads(tree: ast.AST) -> int:
    """Private attributes reached in something else than `self` or `cls`, and private names that are imported."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    ours = [one for one in imports if one.module and one.module.startswith("polyrhythm")]
    return sum(name.name.startswith("_") for one in ours for name in one.names) + sum(
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in _DOCUMENTED
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(tree)
    )


def patches(tree: ast.AST) -> Iterator[bool]:
    """For each name that a test replaces, whether it is ours: neither of the standard library nor of a package."""
    foreign = {name.asname or name.name.partition(".")[0] for one in ast.walk(tree) for name in _foreign(one)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        how, target = node.func.attr, node.args[0]
        if how not in ("setattr", "delattr", "setitem", "delitem") and ast.unparse(node.func) != "mock.patch":
            continue
        if isinstance(target, ast.Constant):
            yield str(target.value).startswith("polyrhythm")
        else:
            yield ast.unparse(target).partition(".")[0] not in foreign


def _foreign(node: ast.AST) -> list[ast.alias]:
    """What an import of another's module brings."""
    names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
    module = node.module or "" if isinstance(node, ast.ImportFrom) else names[0].name if names else ""
    return [] if module.startswith(("polyrhythm", "tests")) else names


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    package = root / "src" / "polyrhythm"
    lines: dict[str, int] = {}
    owners: dict[str, set[str]] = defaultdict(set)
    uses: dict[str, int] = defaultdict(int)
    longest, where = 0, ""
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
    folders = (root / "tests", root / "bench" / "tests")
    tests = [ast.parse(path.read_text(encoding="utf-8")) for folder in folders for path in folder.rglob("*.py")]
    patched = [ours for tree in tests for ours in patches(tree)]
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
    print("private attributes reached from tests:", sum(map(private_reads, tests)))
    print("names patched in tests:", len(patched), "of ours:", sum(patched))


if __name__ == "__main__":
    main()
