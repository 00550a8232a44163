"""NORMGEN_TESTS=all, as `make nightly` sets it: tests run in full what they otherwise take samples of."""

from __future__ import annotations

import os

ALL = os.environ.get("NORMGEN_TESTS") == "all"
