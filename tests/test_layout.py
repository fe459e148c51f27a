"""Imports flow one way: schedules <- engine <- {cli, bench}, models <- {cli, bench}."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {
    "schedules": {"schedules"},
    "models": {"models"},
    "engine": {"schedules", "engine"},
    "cli": {"schedules", "engine", "models", "cli"},
    "bench": {"schedules", "engine", "models", "cli", "bench"},
}
OTHERS = {"schedules": set(), "models": {"torch", "einops", "transformers"}, "engine": {"torch", "tblib"}}
FILES = [file for package in OURS for file in sorted((ROOT / package).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    modules = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                modules |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                modules |= {f"{module}.{alias.name}" for alias in node.names} if module == "stagewright" else {module}
            case ast.ImportFrom():
                raise AssertionError(f"relative import in line {node.lineno}")
    return modules


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_flow_one_way(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    modules = imported(ast.parse(file.read_text("utf-8")))
    ours = {module.split(".")[1] for module in modules if module.startswith("stagewright.")}
    others = {module.split(".")[0] for module in modules} - {"stagewright"} - sys.stdlib_module_names
    assert ours <= OURS[package]
    assert others <= OTHERS.get(package, others)


@pytest.mark.parametrize("file", [file for file in FILES if file.relative_to(ROOT).parts[0] not in ("cli", "bench")])
def test_library_code_never_prints(file: Path) -> None:
    names = {node.id for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Name)}
    assert "print" not in names


def test_the_check_itself_sees_a_violation() -> None:
    tree = ast.parse(
        "import torch.nn\nfrom stagewright.engine.stages.stage import Stage\nfrom stagewright import models"
    )
    assert imported(tree) == {"torch.nn", "stagewright.engine.stages.stage", "stagewright.models"}


def test_every_package_is_installed_and_typed() -> None:
    found = {file.parent for package in OURS for file in (ROOT / package).rglob("*.py")}
    names = {"stagewright." + ".".join(folder.relative_to(ROOT).parts) for folder in found}
    assert names == set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert all((folder / "__init__.py").exists() and (folder / "py.typed").exists() for folder in found)


def test_what_only_sharded_stages_need_is_not_loaded_for_all() -> None:
    """It takes every process of every rank half a second."""
    code = "import sys, stagewright.engine; print('torch.distributed.tensor' in sys.modules, 'sympy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
