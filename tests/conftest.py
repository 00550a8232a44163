"""Kernels of generated modules run in Triton's interpreter where there is no GPU, in whatever order tests are run."""

from __future__ import annotations

import os

try:
    import torch
except ImportError:  # the tests of the loader, the files and the command line need none
    pass
else:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
