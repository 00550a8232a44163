"""A short run of the fuzzer of the loader, and that it would find what there is to find."""

from __future__ import annotations

import pytest

from normgen import nodes
from tests.fuzz_loader import fuzz


def test_a_short_run_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz(60, seed=0, rounds=200) is None
    assert "200 inputs" in capsys.readouterr().out


def test_a_planted_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = nodes.resolve

    def broken(text: str) -> object:
        return {}[text] if "_0" in text else resolve(text)

    monkeypatch.setattr(nodes, "resolve", broken)
    found = fuzz(120, seed=0)
    assert found
    assert (found[0], type(found[1])) == (b"_0", KeyError)
