"""YAML text -> Spec, with every fault of a file found in one run, each at its line, column and key.

What pydantic finds is said again in words for people: what is wrong, what would be right.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from normgen.errors import Fault, SpecError
from normgen.nodes import FLOAT, MAX_BYTES, Document, KeyPath, Node, dotted, resolve
from normgen.spec import Spec, TunedSpec
from normgen.target import Table

M = TypeVar("M", bound=BaseModel)

# Spellings that look like numbers, tried in this order, and why they are not read as one.
_NO_NUMBERS = [
    (FLOAT, "it does not fit a 64-bit float"),
    (re.compile(r"[-+]?0[xob][0-9a-fA-F_]+"), "write it in decimal"),
    (re.compile(r"[-+]?0[0-9]+([.eE].*)?"), "YAML 1.1 reads a leading zero as octal, where 010 is 8; leave it out"),
    (
        re.compile(r"[-+]?[0-9][0-9.]*_[0-9_.]*(e.*)?", re.I),
        "YAML 1.1 skips underscores and YAML 1.2 does not; leave them out",
    ),
    (re.compile(r"[-+]?[0-9]+(:[0-9]+)+(\.[0-9]*)?"), "YAML 1.1 reads colons as base 60, where 12:30 is 750"),
    (re.compile(r"[-+]?\.(inf|nan)", re.I), "it is not finite"),
]


def _why_text(node: Node, *wanted: type) -> str:
    """Why what looks like a wanted kind of scalar is text; empty where nothing looks so."""
    if isinstance(node.value, list):
        return next(filter(None, (_why_text(item, *wanted) for item in node.value)), "")
    if node.quoted:
        return "; the quotes make it text, leave them out" if type(resolve(node.text)) in wanted else ""
    if float not in wanted or not isinstance(node.value, str):
        return ""
    reasons = (f"; {reason}" for pattern, reason in _NO_NUMBERS if pattern.fullmatch(node.text))
    return next(reasons, "")


def _numeric(annotation: Any) -> bool:
    return annotation in (int, float) or any(map(_numeric, get_args(annotation)))


def _model(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The model of the mapping at a path below `model`."""
    for part in path:
        if isinstance(part, str):
            model = _submodel(model.model_fields[part].annotation) or model
    return model


def _field(model: type[BaseModel], path: Sequence[str | int]) -> FieldInfo | None:
    return _model(model, path[:-1]).model_fields[path[-1]] if path and isinstance(path[-1], str) else None


def _example(field: FieldInfo | None) -> str:
    """A value of a key as a file may have it; empty where the key names none."""
    return _flow(field.examples[0]) if field and field.examples else ""


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(below)}' for key, below in value.items())}}}"
    return str(value).replace("e-0", "e-")


def _submodel(annotation: Any) -> type[BaseModel] | None:
    if parts := get_args(annotation):
        return next(filter(None, map(_submodel, parts)), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _keys(model: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    for name, field in model.model_fields.items():
        yield (*path, name)
        if below := _submodel(field.annotation):
            yield from _keys(below, (*path, name))


def _unknown(model: type[BaseModel], path: KeyPath) -> str:
    import difflib  # only a misspelt key pays for it

    key, known = str(path[-1]), list(_model(model, path[:-1]).model_fields)
    elsewhere = [dotted(other) for other in _keys(model) if other[-1] == key]
    meant = difflib.get_close_matches(key, known, n=1) or elsewhere
    return f"unknown key; did you mean {meant[0]}?" if meant else f"unknown key; the keys here are {', '.join(known)}"


def _message(model: type[BaseModel], error: ErrorDetails, node: Node) -> str:
    """A fault that pydantic found, in words for people."""
    path, context = error["loc"], error.get("ctx", {})
    field = _field(model, path) if error["type"] in ("normgen", "missing", "model_type") else None
    example = _example(field)
    why = ""
    match error["type"]:
        case "normgen":
            numeric = field is not None and _numeric(field.annotation)
            return str(context["message"]) + (_why_text(node, int, float) if numeric else "")
        case "missing":
            advice = f"; write `{path[-1]}: {example}`" if example else ""
            return f"the key is missing, and has no default{advice}. {field.description if field else ''}"
        case "extra_forbidden":
            return _unknown(model, path)
        case "literal_error":
            wanted = str(context["expected"]).replace("'", "")
        case "bool_type":
            wanted, why = "true or false", _why_text(node, bool)
        case "float_type":
            wanted, why = "a number such as 1.0 or 1e-6", _why_text(node, int, float)
        case "int_type":
            wanted, why = "a whole number such as 4096", _why_text(node, int, float)
        case "string_type":
            wanted = "a word"
        case "list_type":
            wanted = f"a list such as [{node}]" if isinstance(node.value, str) else "a list in brackets"
        case "model_type":
            wanted = f"a mapping of the keys {', '.join(_model(model, path).model_fields)}"
            wanted += f" such as {example}" if example else ""
        case _:
            return error["msg"]
    return f"write {wanted}, not {node}{why}"


def _faults(model: type[BaseModel], error: ValidationError, document: Document) -> Iterator[Fault]:
    for detail in error.errors(include_url=False, include_input=False):
        blamed = detail.get("ctx", {}).get("key") or ()
        path = (*detail["loc"], *((blamed,) if isinstance(blamed, str) else blamed))
        if document.refused(path):
            continue
        key, value = document.at(path)
        place = key if detail["type"] == "extra_forbidden" else value
        yield Fault(document.source, place.line, place.column, dotted(path), _message(model, detail, value))


def read(path: Path) -> bytes:
    """The bytes of a spec file, at most one more than `load` accepts.

    Raises SpecError where there is no such regular file, it is no YAML by its name, or it cannot be read.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) and path.suffix in (".yaml", ".yml"):
            with path.open("rb") as file:
                return file.read(MAX_BYTES + 1)
        if stat.S_ISREG(mode):
            message = "a spec is a .yaml file"
        else:
            message = "a folder; name the spec files in it" if stat.S_ISDIR(mode) else "not a regular file"
    except OSError as error:
        message = f"cannot be read: {(error.strerror or str(error)).lower()}"
        meant = Path("specs", f"{path.stem}.yaml")
        if isinstance(error, FileNotFoundError) and meant.is_file():
            message += f"; did you mean {meant}?"
    raise SpecError([Fault(str(path), 0, 0, "", message)])


def table_path(path: Path) -> Path:
    """Where the table of a spec lies, if there is one: what `normgen tune` found, `tuned/<name>.yaml` beside it."""
    return path.parent / "tuned" / path.name


def read_table(path: Path) -> tuple[bytes, str] | None:
    """The bytes of the table of the spec at `path`, and the path that faults name; None where there is no such file.

    Raises SpecError where there is one that cannot be read.
    """
    found = table_path(path)
    try:
        os.lstat(found)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # there may be one: reading it says what is in the way
    return read(found), str(found)


def load(data: bytes, source: str, table: tuple[bytes, str] | None = None) -> Spec:
    """The spec that a file holds, with the table beside it (`read_table`). `source` is the path that faults name.

    Raises SpecError with all faults of both files, each file's in the order of their lines. What lies beyond the first
    fault of syntax is not seen; rules over the numbers of a rung, or over a table and its spec, are held once those are
    right by themselves.
    """
    if table is None:
        return _load(Spec, Document(data, source), "a spec is a mapping of keys such as name, norm and eps")
    faults: list[Fault] = []
    try:
        spec = load(data, source)
    except SpecError as error:
        faults += error.faults
    try:
        document = Document(*table, null_keys=("widest",), hint="`normgen tune` writes it, or remove it")
        found = _load(Table, document, "a table is a mapping of keys such as gpu, forward and chunks")
    except SpecError as error:
        faults += error.faults
    if faults:
        raise SpecError(faults)
    tuned = TunedSpec.model_construct(**dict(spec), table=found)
    if spec.strategy == "single_block":
        _check_reach(tuned, document)
    return tuned


def load_at(path: Path) -> Spec:
    """The spec at `path`, with the table beside it. Raises SpecError as `read` and `load` do."""
    return load(read(path), str(path), read_table(path))


def _check_reach(spec: TunedSpec, document: Document) -> None:
    """Refuse a table whose tiles end before the rows of a spec that has nothing else."""
    widest = spec.widths[-1] if spec.widths else 1
    for name in ("forward", "backward") if spec.grad else ("forward",):
        tiles = getattr(spec.table, name)
        if widest > (tiles[-1].widest if tiles else 0):
            _, place = document.at((name,))
            message = (
                f"strategy single_block launches tiles only, and none takes rows of {widest}; add one, or tune anew"
            )
            raise SpecError([Fault(document.source, place.line, place.column, name, message)])


def _load(model: type[M], document: Document, meant: str) -> M:
    faults = document.faults
    if not isinstance(document.root.value, dict):
        message = f"{meant}, not {document.root}"
        raise SpecError([*faults, Fault(document.source, document.root.line, document.root.column, "", message)])
    try:
        found = model.model_validate(document.root.data)
    except ValidationError as error:
        faults = [*faults, *_faults(model, error, document)]
    if faults:
        raise SpecError(sorted(faults, key=lambda fault: (fault.line, fault.column)))
    return found


def fault_at(data: bytes, source: str, key: str, message: str) -> Fault:
    """A fault that was found after loading, as between two specs, at the place of its dotted key."""
    _, value = Document(data, source).at(key.split("."))
    return Fault(source, value.line, value.column, key, message)
