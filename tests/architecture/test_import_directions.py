"""The house stands: imports run one way, no circle of files, no import inside a function but for the heavy libraries."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "telemetry": set(),
    "agent": {"telemetry"},
    "engine": {"telemetry"},
    "rules": {"telemetry"},
    "dashboard": {"telemetry", "rules"},
    "pairscope": {"telemetry", "agent", "engine", "rules", "dashboard"},
}
HEAVY = {"torch", "dash", "amdsmi", "plotly", "transformers", "influxdb_client", "pyarrow"}
"""What a light command must not pull in; a module that itself imports one of these may be imported late, too."""


def modules() -> dict[str, Path]:
    found = {}
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    names: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import at line {node.lineno}"
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                names.append((whole if whole in MODULES else module, node.lineno))
    return names


def is_type_checking(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_the_walk_sees_every_package() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(MAY_IMPORT)
    assert len(MODULES) > 12


def test_packages_import_downwards_only() -> None:
    wrong = []
    for name, path in MODULES.items():
        own = name.split(".")[0]
        for target, line in imports(ast.parse(path.read_text("utf-8"))):
            room = target.split(".")[0]
            if room in MAY_IMPORT and room != own and room not in MAY_IMPORT[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert wrong == []


def test_no_circle_of_files() -> None:
    graph = {
        name: {
            target for target, _ in imports(ast.parse(path.read_text("utf-8"))) if target in MODULES and target != name
        }
        for name, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def pulls_heavy(name: str, seen: frozenset[str] = frozenset()) -> bool:
    if name.split(".")[0] in HEAVY:
        return True
    if name not in MODULES or name in seen:
        return False
    tree = ast.parse(MODULES[name].read_text("utf-8"))
    return any(pulls_heavy(target, seen | {name}) for target, _ in imports(tree))


def test_imports_inside_functions_only_keep_heavy_libraries_out() -> None:
    wrong = []
    for path in MODULES.values():
        tree = ast.parse(path.read_text("utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for target, line in imports(function):
                    if not pulls_heavy(target):
                        wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target} inside {function.name}")
    assert wrong == []


def test_each_package_says_what_lives_there_and_what_it_may_import() -> None:
    for package in MAY_IMPORT:
        docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text("utf-8"))) or ""
        assert len(docstring.splitlines()) >= 3, package
        assert "mport" in docstring, package


def test_no_room_for_leftovers() -> None:
    vague = {"utils", "util", "helpers", "common", "misc", "manager"}
    assert [path for path in MODULES.values() if vague & set(path.with_suffix("").parts[len(ROOT.parts) :])] == []
