"""YAML text -> nodes that know their place, and the faults of form: encoding, syntax, what specs leave out of YAML.

PyYAML resolves scalars as YAML 1.1 does: `1e-6` is text, `010` is 8, `on` is true, `12:30` is 750, and the last of two
equal keys wins. So only its parser is used, and scalars are resolved here: as in the core schema of YAML 1.2, less the
spellings that the two versions of YAML read differently.
"""

from __future__ import annotations

import codecs
import math
import re
import reprlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from normgen.errors import Fault, SpecError

STARTING = "`normgen new NAME` writes a spec to start from"
MAX_BYTES = 64 * 1024
MAX_DEPTH = 6

KeyPath = tuple[str | int, ...]
_Scalar = str | int | float | bool | None

# What YAML does not allow in a file, and the line ends that only YAML knows: an editor would count other lines.
_FORBIDDEN = re.compile("[^\t\n -~\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}

# How PyYAML names the commonest slips, and what they are called here.
_SYNTAX = {
    "'\\t' that cannot start any token": "a tab cannot stand here; indent with spaces",
    "expected <block end>, but found": "the indentation does not fit the lines above",
    "could not find expected ':'": "a key needs a colon and a space after it",
    "mapping values are not allowed here": "a second `key: value` in one line; put it on a line of its own",
    "'<stream end>'": "the file ends inside brackets",
    "found unexpected end of stream": "a quote is never closed",
}


@dataclass(frozen=True)
class Node:
    """A key or a value of the file. A scalar has its text as written; a value of None is a hole, reported already."""

    line: int
    column: int
    value: _Scalar | list[Node] | dict[str, tuple[Node, Node]]
    text: str = ""
    quoted: bool = False

    @property
    def data(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.data for key, (_, node) in self.value.items()}
        return [node.data for node in self.value] if isinstance(self.value, list) else self.value

    def __str__(self) -> str:
        if isinstance(self.value, (list, dict)):
            return "a list" if isinstance(self.value, list) else "a mapping"
        return reprlib.repr(self.text) if self.quoted else word(self.text)


class Document:
    """The nodes of a spec file, or of the table beside one.

    `null_keys` are those that may be null; `hint` says how to begin where the file is empty.
    `faults` are those of form that leave the rest of the file readable; the constructor raises SpecError for others.
    """

    def __init__(self, data: bytes, source: str, null_keys: Container[str] = (), hint: str = STARTING) -> None:
        self.source, self.null_keys, self.hint = source, null_keys, hint
        self.faults: list[Fault] = []
        self.holes: set[KeyPath] = set()
        self.around_holes: set[KeyPath] = set()
        self.yaml: Any = yaml.SafeLoader(self._text(data))
        try:
            self.root = self._document()
        except yaml.MarkedYAMLError as error:
            # What PyYAML quotes is as long as it is in the file.
            problem = re.sub(r"'([^']{60})[^']*'", r"'\1...'", str(error.problem))
            known = (sentence for fragment, sentence in _SYNTAX.items() if fragment in problem)
            # Of a key without a colon, PyYAML marks the line after it.
            mark = error.context_mark if error.context == "while scanning a simple key" else error.problem_mark
            raise self._stop(mark, f"not valid YAML: {next(known, problem)}") from None
        except (ValueError, OverflowError):
            # PyYAML lets a few impossible numbers through to int() and chr(), such as "\UFFFFFFFF".
            raise self._stop(self.yaml.get_mark(), "not valid YAML: no such character or number") from None
        finally:
            self.yaml.dispose()

    def _text(self, data: bytes) -> str:
        if len(data) > MAX_BYTES:
            raise SpecError([Fault(self.source, 0, 0, "", f"larger than {MAX_BYTES // 1024} KiB; a spec is a page")])
        data = data.removeprefix(codecs.BOM_UTF8)
        try:
            text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            before = data[: error.start].decode()
            raise self._misfit(before, f"not UTF-8: byte 0x{data[error.start]:02x}") from None
        if forbidden := _FORBIDDEN.search(text):
            message = f"the character U+{ord(forbidden[0]):04X} is not allowed in a spec"
            raise self._misfit(text[: forbidden.start()], message)
        return text

    def _misfit(self, before: str, message: str) -> SpecError:
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return SpecError([Fault(self.source, line, column, "", message)])

    def _refuse(self, mark: Any, path: KeyPath, message: str) -> None:
        self.faults.append(Fault(self.source, mark.line + 1, mark.column + 1, dotted(path), message))

    def _hole(self, mark: Any, path: KeyPath, message: str) -> Node:
        self._refuse(mark, path, message)
        self.holes.add(path)
        self.around_holes.update(path[:end] for end in range(len(path)))
        return Node(mark.line + 1, mark.column + 1, None)

    def _stop(self, mark: Any, message: str, path: KeyPath = ()) -> SpecError:
        self._refuse(mark, path, message)
        return SpecError(self.faults)

    def _document(self) -> Node:
        self.yaml.get_event()
        start = self.yaml.get_event()
        if isinstance(start, yaml.DocumentStartEvent):
            if start.version or start.tags:
                self._refuse(start.start_mark, (), "directives (%YAML, %TAG) are not used in specs; leave them out")
            first = self.yaml.peek_event()
            if not isinstance(first, yaml.ScalarEvent) or _scalar(first).value is not None:
                root = self._node(())
                self.yaml.get_event()
                end = self.yaml.get_event()
                if not isinstance(end, yaml.StreamEndEvent):
                    raise self._stop(end.start_mark, "a second document starts here; a file holds one spec")
                return root
        raise SpecError([Fault(self.source, 1, 1, "", f"the file is empty; {self.hint}")])

    def _node(self, path: KeyPath) -> Node:
        event = self.yaml.get_event()
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            return self._hole(mark, path, "aliases (*name) are not used in specs; write the value out")
        self._properties(event, path)
        if isinstance(event, yaml.ScalarEvent):
            node = _scalar(event)
            if node.value is None and not (node.text and path and path[-1] in self.null_keys):
                return self._hole(mark, path, "the value is missing; write one, or leave the key out")
            if forbidden := _FORBIDDEN.search(node.text):
                return self._hole(mark, path, f"the character U+{ord(forbidden[0]):04X} is not allowed in a spec")
            return node
        if len(path) == MAX_DEPTH:
            raise self._stop(mark, f"nested deeper than {MAX_DEPTH} levels; no key of a spec is", path)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not self.yaml.check_event(yaml.SequenceEndEvent):
                items.append(self._node((*path, len(items))))
            self.yaml.get_event()
            return Node(mark.line + 1, mark.column + 1, items)
        entries: dict[str, tuple[Node, Node]] = {}
        while not self.yaml.check_event(yaml.MappingEndEvent):
            self._entry(entries, path)
        self.yaml.get_event()
        return Node(mark.line + 1, mark.column + 1, entries)

    def _entry(self, entries: dict[str, tuple[Node, Node]], path: KeyPath) -> None:
        event: Any = self.yaml.peek_event()
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(event.start_mark, path, "a key must be a word such as eps, not a list, a mapping or an alias")
            known = len(self.faults)
            self._node((*path, "?"))
            self._node((*path, "?"))
            del self.faults[known:]  # of what stands in them there is nothing to mend
            return
        self.yaml.get_event()
        key = _scalar(event)
        here = (*path, key.text)
        self._properties(event, here)
        if not isinstance(key.value, str):
            self._refuse(event.start_mark, path, f"a key must be a word such as eps, not {key or 'nothing'}")
        elif key.text == "<<":
            self._refuse(event.start_mark, path, "merge keys (<<) are not used in specs; write the keys out")
        elif key.text in entries:
            first = entries[key.text][0].line
            self._refuse(event.start_mark, here, f"the key stands in line {first} already; keep one of the two")
        else:
            entries[key.text] = (key, self._node(here))
            return
        self._node(here)

    def _properties(self, event: Any, path: KeyPath) -> None:
        if event.anchor is not None:
            self._refuse(event.start_mark, path, "anchors (&name) are not used in specs; leave it out")
        if getattr(event, "tag", None) is not None:
            self._refuse(event.start_mark, path, "tags (!name) are not used in specs; leave it out")

    def refused(self, path: KeyPath) -> bool:
        """Whether a value was refused at, above or below a path: what else is wrong there may only follow from it."""
        return path in self.around_holes or any(path[:end] in self.holes for end in range(len(path) + 1))

    def at(self, path: Sequence[str | int]) -> tuple[Node, Node]:
        """Key and value at a path; where it leads nowhere, those of the innermost mapping on the way."""
        key = value = self.root
        for part in path:
            if isinstance(value.value, dict) and part in value.value:
                key, value = value.value[str(part)]
            elif isinstance(value.value, list) and isinstance(part, int):
                key = value = value.value[part]
            else:
                break
        return key, value


def _scalar(event: Any) -> Node:
    quoted = event.style is not None
    value = event.value if quoted else resolve(event.value)
    return Node(event.start_mark.line + 1, event.start_mark.column + 1, value, event.value, quoted)


def resolve(text: str) -> _Scalar:
    """What an unquoted scalar means: null, a boolean, a finite number, else text."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        number = float(text)
        underflow = number == 0 and re.match(r"[-+.0]*[1-9]", text)
        if math.isfinite(number) and not underflow:
            return number
    return text


def word(text: str) -> str:
    """Text from a file as it may stand in a message: bare where that is safe and short."""
    return text if re.fullmatch(r"[!-~]{1,64}", text) else reprlib.repr(text)


def dotted(path: Sequence[str | int]) -> str:
    """A path as faults name it: `dtypes.input[0]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{word(part)}" for part in path)
    return "".join(parts).removeprefix(".")
