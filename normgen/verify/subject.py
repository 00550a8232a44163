"""The implementation under test: found by its name, called with the spec's arguments by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from normgen.modules import imported


class Unusable(Exception):
    """The implementation cannot be tested at all. The message says why; it is shown after the implementation's name."""


class Subject:
    """An implementation, called with a list of tensors in the spec's order.

    Raises Unusable where its signature does not take the arguments by name, or where what it returns is not one tensor
    for each result of the spec.
    """

    def __init__(self, function: Callable[..., object], arguments: Sequence[str], results: Sequence[str]):
        self.function = function
        self.refused: dict[str, list[int]] = {}
        """Dtypes and error, of what it does not take; and the widths at which it was tried."""
        self.arguments, self.results = arguments, results
        names = [*arguments, "eps"]
        try:
            inspect.signature(function).bind(**dict.fromkeys(names))
        except TypeError as error:
            raise Unusable(f"cannot be called with {_sentence(names)} by name: {error}") from None
        except ValueError:  # written in C, without a signature to ask: the first call will tell
            pass

    def __call__(self, tensors: Sequence[Tensor], eps: float) -> list[Tensor]:
        found = self.function(**dict(zip(self.arguments, tensors, strict=True)), eps=eps)
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        if len(results) != len(self.results) or not all(isinstance(result, Tensor) for result in results):
            kinds = _sentence([type(result).__name__ for result in results]) if results else "nothing"
            wanted = (
                f"the tensors {_sentence(self.results)}" if len(self.results) > 1 else f"the tensor {self.results[0]}"
            )
            raise Unusable(f"returns {kinds}; it must return {wanted}")
        return cast("list[Tensor]", results)


def _sentence(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def find(name: str) -> Callable[..., object]:
    """The function that `package.module:function` or `file.py:function` names. Raises Unusable where there is none."""
    place, _, attribute = name.rpartition(":")
    module = _module(place)
    try:
        function = attrgetter(attribute)(module)
    except AttributeError:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, there)
        has = f"did you mean {near[0]}?" if near else f"it has {_sentence(there)}" if there else "it has no function"
        raise Unusable(f"{place} has no {attribute!r}; {has}") from None
    if not callable(function):
        raise Unusable(f"is no function but of type {type(function).__name__}")
    return cast("Callable[..., object]", function)


def _module(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise Unusable(f"there is no file {place}")
        sys.path.insert(0, str(path.parent))  # as for a script: what lies beside it can be imported
        return imported(f"normgen_verify.implementation.{path.stem}", path)
    except Unusable:
        raise
    except ModuleNotFoundError as error:
        missing = error.name and (place == error.name or place.startswith(f"{error.name}."))
        why = f"there is no module {error.name}" if missing else f"it imports {error.name}, which is not installed"
        raise Unusable(f"{place} cannot be imported: {why}") from None
    except (Exception, SystemExit) as error:
        reason = (str(error) or "no message").splitlines()[0]
        raise Unusable(f"{place} cannot be imported: {type(error).__name__}: {reason}") from None


_subjects: list[Subject] = []


def use(subject: Subject) -> None:
    """Makes `subject` the one that the battery of this process tests."""
    _subjects[:] = [subject]


def subject() -> Subject:
    """The one under test in this process."""
    return _subjects[0]
