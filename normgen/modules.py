"""Generated modules, imported from their files: Python and Triton read the source of a kernel from there."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType


def interpreted() -> bool:
    """Whether TRITON_INTERPRET is set so that Triton interprets kernels."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def imported(name: str, path: Path) -> ModuleType:
    """The module in that file under that name, imported once a process, since an operator exists once."""
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, path)
        assert found and found.loader
        sys.modules[name] = importlib.util.module_from_spec(found)
        try:
            found.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]  # half of it is none
            raise
    return sys.modules[name]
