"""What goes into a model directory beside the checkpoint: our own code, and what a machine needs to serve it. No mlflow."""

from __future__ import annotations

import importlib
import shutil
from importlib.metadata import version as installed
from pathlib import Path

PACKAGES = ("gr_core", "kernels")
# What a machine needs to serve; pinned to what trained, without local labels such as +cpu.
REQUIREMENTS = ("mlflow", "torch", "numpy", "pyarrow", "safetensors", "pandas")


def copy_code(folder: Path) -> list[str]:
    """Copy our packages into a folder and return their paths there."""
    made = [folder / name for name in PACKAGES]
    for package in made:
        source = Path(str(importlib.import_module(package.name).__file__)).parent
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    return [str(package) for package in made]


def requirements() -> list[str]:
    """Return the pinned requirements of a served model."""
    return [f"{name}=={installed(name).partition('+')[0]}" for name in REQUIREMENTS]
