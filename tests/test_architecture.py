"""The layers of design section 2, one test id per file: who may import what, and every module says what it is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["kernels", "gr_core", "tasks", "flows"]
FILES = sorted(p for layer in LAYERS for p in (ROOT / layer).rglob("*.py"))
BARE = (
    "gr_core/model/",
    "gr_core/train/",
    "gr_core/data/batches.py",
    "gr_core/data/packfile.py",
    "gr_core/data/planning.py",
    "gr_core/data/ragged.py",
    "gr_core/data/prefetch.py",
    "gr_core/data/intervals.py",
    "gr_core/data/synthetic.py",
    "gr_core/data/world.py",
    "gr_core/eval/__main__.py",
    "gr_core/eval/metrics.py",
    "gr_core/eval/scores.py",
    "gr_core/eval/scoring.py",
    "gr_core/eval/watching.py",
    "kernels/",
)
ADAPTERS = {
    "prefect": ("flows/", "tasks/"),
    "mlflow": ("gr_core/registry/mlflow_store.py", "gr_core/registry/database.py"),
    "deltalake": ("gr_core/lake/events/", "gr_core/lake/journal.py"),
    "s3fs": ("gr_core/lake/",),
    "polars": ("gr_core/lake/", "gr_core/data/", "gr_core/eval/", "gr_core/report/", "gr_core/stages/"),
}


def imports(path: Path) -> set[str]:
    """Return the dotted names a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward_and_adapters_stay_alone(path: Path) -> None:
    """A file imports only its own layer and lower ones, and a library only where its adapter lives."""
    name = path.relative_to(ROOT).as_posix()
    layer = LAYERS.index(name.split("/")[0])
    tops = {module.split(".")[0] for module in imports(path)}

    assert not tops & set(LAYERS[layer + 1 :]), name
    for library, places in ADAPTERS.items():
        assert library not in tops or name.startswith(places), f"{name} imports {library}"
    if name.startswith(BARE):
        assert not tops & {"polars", "pydantic", "prefect", "mlflow", "deltalake", "fsspec", "pandas"}, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_and_public_function_is_documented(path: Path) -> None:
    """Every module, and every public function and class in it, has a docstring."""
    tree = ast.parse(path.read_text())

    assert ast.get_docstring(tree), path
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name}"


@pytest.mark.parametrize("module", ["gr_core.train.__main__", "gr_core.eval.watching", "gr_core.data.synthetic"])
def test_bare_modules_load_nothing_but_the_bare_libraries(module: str) -> None:
    """Training, scoring and the synthetic world run on a machine without Polars, pydantic, Prefect or MLflow."""
    code = (
        f"import importlib, sys; importlib.import_module({module!r}); "
        "print([m for m in ('polars','pydantic','prefect','mlflow','deltalake','fsspec','pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)

    assert done.stdout.strip() == "[]"


def test_the_huggingface_kernels_package_is_not_installed() -> None:
    """`kernels` is ours: the PyPI package of that name would break it and be broken by it."""
    import kernels

    assert Path(kernels.__file__).parent == ROOT / "kernels"
