"""The house rules of docs/architecture.md: imports go down the floors, ranks live in the mesh."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT)
    for folder in ("parallel3d", "models", "launch")
    for path in (ROOT / folder).rglob("*.py")
)
# The first pattern that matches a module gives its floor.
FLOORS = [
    (r"launch(\.|$)", 6),
    (r"parallel3d\.(trainer|run|run_folder|assembly|checkpoint|profile)(\.|$)", 5),
    (r"parallel3d\.(verify|local_ranks|stopping|attempts|foresight|calibrate\w*)(\.|$)", 5),
    (r"parallel3d\.(stopping|attempts)$", 5),
    (r"parallel3d\.pipeline\.(executor|stages)$", 4),
    (r"models\.\w+\.(blocks|huggingface)$", 3),
    (r"parallel3d\.(tensor|engine|data|metrics)(\.|$)", 2),
    (r"parallel3d\.(mesh|transfer|waiting)$", 1),
    (r"(parallel3d|models)(\.|$)", 0),
]
MESH_ONLY = {"get_rank", "new_group", "new_subgroups"}


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> int | None:
    return next((floor for pattern, floor in FLOORS if re.match(pattern, module)), None)


def imports_of(tree: ast.AST) -> set[str]:
    """Every module that may be imported; `from a import b` may mean the module a.b."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if is_module(name) else str(node.module) for name in names}
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse((ROOT / path).read_text()) for path in FILES}


def test_imports_go_down(trees):
    for path, tree in trees.items():
        own = floor_of(module_of(path))
        for name in imports_of(tree):
            other = floor_of(name)
            assert other is None or other <= own, f"{path} (floor {own}) imports {name} ({other})"


def test_no_cycles(trees):
    graph = {module_of(path): imports_of(tree) for path, tree in trees.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module in graph and module not in done:
            for name in graph[module]:
                visit(name, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_floor_0_has_no_torch_and_only_the_engine_has_deepspeed(trees):
    for path, tree in trees.items():
        packages = {name.split(".")[0] for name in imports_of(tree)}
        if floor_of(module_of(path)) == 0:
            assert not packages & {"torch", "deepspeed", "transformers", "accelerate"}, path
        if not module_of(path).startswith("parallel3d.engine"):
            assert "deepspeed" not in packages, path


def test_ranks_live_in_the_mesh(trees):
    for path, tree in trees.items():
        if path == Path("parallel3d/mesh.py"):
            continue
        for node in ast.walk(tree):
            name = getattr(node, "attr", getattr(node, "id", getattr(node, "value", None)))
            assert name not in MESH_ONLY | {"RANK", "LOCAL_RANK"}, f"{path}:{node.lineno}: {name}"


def test_no_file_over_300_lines():
    for path in [*FILES, *(p.relative_to(ROOT) for p in (ROOT / "tests").rglob("*.py"))]:
        assert len((ROOT / path).read_text().splitlines()) <= 300, path
        assert path.name != "utils.py"
