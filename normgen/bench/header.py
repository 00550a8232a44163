"""What measurements rest on: the GPU, versions, the date."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from typing import Any

import torch
import triton

from normgen import __version__


def header() -> dict[str, Any]:
    """The first keys of a JSON file; None for what is not there: without a GPU, Triton's interpreter was measured."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "liger": version("liger-kernel"),
        "quack": version("quack-kernels"),
        "cutlass_dsl": version("nvidia-cutlass-dsl"),
        "cudnn_frontend": version("nvidia-cudnn-frontend"),
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "normgen": __version__,
        "python_native": python_native(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def python_native() -> dict[str, Any] | None:
    """Which kernels in Python torch may run inside its own operators; None where this torch has no such thing."""
    state: Any = getattr(torch.backends, "python_native", None)
    if state is None:
        return None
    return {
        dsl: {
            "available": dsl in state.available_dsls,
            "disabled": state.is_dsl_disabled(dsl),
            "operations": list(state.get_dsl_operations(dsl)),
        }
        for dsl in state.all_dsls
    }


def version(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
