"""The loader: what it accepts, and the exact words and places of what it refuses."""

from __future__ import annotations

import keyword
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normgen.errors import SpecError
from normgen.loader import fault_at, load, read
from normgen.spec import Spec

BASE = "name: a\nnorm: rms\neps: {value: 1e-6}\n"
KEYS = "name, norm, hidden, eps, dtypes, affine, residual, save, grad, strategy"
NUMBER = "write a number such as 1.0 or 1e-6, not"
WIDTH = "is not a width; write `dynamic`, a width from 1 to 1048576, or a list of distinct widths such as [1024, 4096]"
OCTAL = "YAML 1.1 reads a leading zero as octal, where 010 is 8; leave it out"
NAME = "is not a usable name; use lower-case ASCII letters, digits and _, starting with a letter, at most 48 characters"
EMPTY = "the file is empty; `normgen new NAME` writes a spec to start from"
MAPPING = "must be `none` or a mapping of the keys of"
NO_WEIGHT = "must be true: no norm in use has a shift without a scale; for neither, write `affine: none`"
NO_SUM = "dtype is the dtype of the stored sum, and store_sum is false; leave dtype out"
NARROW = (
    "single_block keeps a row in registers, 8192 elements at most with grad, not 16384; "
    "write strategy: auto or a smaller width"
)
NO_DEFAULT = "the key is missing, and has no default"
NO_VALUE = f"{NO_DEFAULT}; write `value: 1e-6`. A positive, finite number; 1e-6 is read as a number."


def faults(text: str | bytes) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load(text.encode() if isinstance(text, str) else text, "s.yaml")
    return str(caught.value).split("\n")


def spec(text: str) -> Spec:
    return load(text.encode(), "s.yaml")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-6", 1e-6),
        ("1E-5", 1e-5),
        ("1e5", 1e5),
        ("1.0e-5", 1e-5),
        ("1.0E+5", 1e5),
        (".00001", 1e-5),
        ("1.e-5", 1e-5),
        ("1.", 1.0),
        ("+1.5", 1.5),
        ("0.001", 1e-3),
        ("1", 1.0),
        ("100000000000000000000000", 1e23),
    ],
)
def test_numbers(written: str, meant: float) -> None:
    value = spec(BASE.replace("1e-6", written)).eps.value
    assert value == meant
    assert type(value) is float


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("010", f"{NUMBER} 010; {OCTAL}"),
        ("00.1", f"{NUMBER} 00.1; {OCTAL}"),
        ("0x10", f"{NUMBER} 0x10; write it in decimal"),
        ("0o17", f"{NUMBER} 0o17; write it in decimal"),
        ("1_000", f"{NUMBER} 1_000; YAML 1.1 skips underscores and YAML 1.2 does not; leave them out"),
        ("12:30", f"{NUMBER} 12:30; YAML 1.1 reads colons as base 60, where 12:30 is 750"),
        (".inf", f"{NUMBER} .inf; it is not finite"),
        ("-.INF", f"{NUMBER} -.INF; it is not finite"),
        (".nan", f"{NUMBER} .nan; it is not finite"),
        ("1e400", f"{NUMBER} 1e400; it does not fit a 64-bit float"),
        ("1e-400", f"{NUMBER} 1e-400; it does not fit a 64-bit float"),
        ("1.5.2", f"{NUMBER} 1.5.2"),
        ("inf", f"{NUMBER} inf"),
        ("true", f"{NUMBER} true"),
        ("'1e-6'", f"{NUMBER} '1e-6'; the quotes make it text, leave them out"),
        ('"1"', f"{NUMBER} '1'; the quotes make it text, leave them out"),
        ("[1]", f"{NUMBER} a list"),
        ("{a: 1}", f"{NUMBER} a mapping"),
        ("", "the value is missing; write one, or leave the key out"),
        ("~", "the value is missing; write one, or leave the key out"),
        ("0", "eps must be positive and finite, not 0.0; 1e-5 and 1e-6 are usual"),
        ("-1e-6", "eps must be positive and finite, not -1e-06; 1e-5 and 1e-6 are usual"),
        ("1e-300", "eps must be a normal fp32 number (1.2e-38 to 3e38), not 1e-300; 1e-5 and 1e-6 are usual"),
    ],
)
def test_no_numbers(written: str, said: str) -> None:
    column = 14 if written else 13
    assert faults(BASE.replace("1e-6", written)) == [f"s.yaml:3:{column}: eps.value: {said}"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # booleans
        ("grad: yes", "4:7: grad: write true or false, not yes"),
        ("grad: off", "4:7: grad: write true or false, not off"),
        ("grad: 0", "4:7: grad: write true or false, not 0"),
        ("grad: 010", "4:7: grad: write true or false, not 010"),
        ("grad: 'true'", "4:7: grad: write true or false, not 'true'; the quotes make it text, leave them out"),
        # choices
        ("strategy: Auto", "4:11: strategy: write auto, single_block or welford, not Auto"),
        ("strategy: true", "4:11: strategy: write auto, single_block or welford, not true"),
        ("strategy: [auto]", "4:11: strategy: write auto, single_block or welford, not a list"),
        ("residual: {dtype: half}", "4:19: residual.dtype: write same or float32, not half"),
        ("residual: {add: after_norm}", "4:17: residual.add: write before_norm, not after_norm"),
        ("dtypes: {output: '1'}", "4:18: dtypes.output: write same, float16, bfloat16 or float32, not '1'"),
        # lists
        ("save: rstd", "4:7: save: write a list such as [rstd], not rstd"),
        ("save: {}", "4:7: save: write a list in brackets, not a mapping"),
        ("save: [rstd, men]", "4:14: save[1]: write mean or rstd, not men"),
        ("save: [rstd, rstd]", "4:7: save: rstd is listed twice; list each statistic once"),
        ("save: [mean]", "4:7: save: an RMS norm has no mean; write save: [rstd] or save: []"),
        ("dtypes: {input: []}", "4:17: dtypes.input: the list is empty; name at least one dtype"),
        ("dtypes: {input: [float16, float16]}", "4:17: dtypes.input: float16 is listed twice; list each dtype once"),
        # mappings
        ("affine: {weight: false}", f"4:18: affine.weight: {NO_WEIGHT}"),
        ("affine: {weight: false, bias: true}", f"4:18: affine.weight: {NO_WEIGHT}"),
        ("affine: true", f"4:9: affine: {MAPPING} affine, not true; write `affine: {{}}` for the defaults"),
        ("residual: no", f"4:11: residual: {MAPPING} residual, not 'no'; write `residual: {{}}` for the defaults"),
        ("dtypes: float16", "4:9: dtypes: write a mapping of the keys input, weight, output, not float16"),
        ("affine:", "4:8: affine: the value is missing; write one, or leave the key out"),
        # widths
        ("hidden: 010", f"4:9: hidden: '010' {WIDTH}; {OCTAL}"),
        ("hidden: [1, 0x10]", f"4:9: hidden: [1, '0x10'] {WIDTH}; write it in decimal"),
        ("hidden: '4096'", f"4:9: hidden: '4096' {WIDTH}; the quotes make it text, leave them out"),
        ("hidden: 1024.0", f"4:9: hidden: 1024.0 {WIDTH}"),
        ("hidden: 1e3", f"4:9: hidden: 1000.0 {WIDTH}"),
        ("hidden: true", f"4:9: hidden: true {WIDTH}"),
        ("hidden: []", f"4:9: hidden: [] {WIDTH}"),
        ("hidden: 0", f"4:9: hidden: the width 0 is out of range; {WIDTH.removeprefix('is not a width; ')}"),
        ("hidden: [8, 8]", f"4:9: hidden: the width 8 is listed twice; {WIDTH.removeprefix('is not a width; ')}"),
        # keys
        ("epsilon: 1", "4:1: epsilon: unknown key; did you mean eps?"),
        ("straegy: auto", "4:1: straegy: unknown key; did you mean strategy?"),
        ("bias: true", "4:1: bias: unknown key; did you mean affine.bias?"),
        ("affine: {wieght: true}", "4:10: affine.wieght: unknown key; did you mean weight?"),
        ("residual: {hidden: 1}", "4:12: residual.hidden: unknown key; did you mean hidden?"),
        ("dtypes: {q: 1}", "4:10: dtypes.q: unknown key; the keys here are input, weight, output"),
        ("on: 1", f"4:1: on: unknown key; the keys here are {KEYS}"),
        ('"a\\nb": 1', f"4:1: 'a\\nb': unknown key; the keys here are {KEYS}"),
        ("true: 1", "4:1: a key must be a word such as eps, not true"),
        ("7: 1", "4:1: a key must be a word such as eps, not 7"),
        ("affine: {~: 1}", "4:10: affine: a key must be a word such as eps, not ~"),
        ("? [a]\n: 1", "4:3: a key must be a word such as eps, not a list, a mapping or an alias"),
        ("{{7*7}}: ~", "4:1: a key must be a word such as eps, not a list, a mapping or an alias"),
        ("norm: rms", "4:1: norm: the key stands in line 2 already; keep one of the two"),
        ("affine: {bias: true, bias: 1}", "4:22: affine.bias: the key stands in line 4 already; keep one of the two"),
        # what YAML has and specs have not
        ("grad: &a true", "4:7: grad: anchors (&name) are not used in specs; leave it out"),
        ("grad: *a", "4:7: grad: aliases (*name) are not used in specs; write the value out"),
        ("<<: {grad: true}", "4:1: merge keys (<<) are not used in specs; write the keys out"),
        ("grad: !!bool true", "4:7: grad: tags (!name) are not used in specs; leave it out"),
        ("grad: ! true", "4:7: grad: tags (!name) are not used in specs; leave it out"),
        ("--- \nname: b", "4:1: a second document starts here; a file holds one spec"),
        ("a: [[[[[[[]]]]]]]", "4:9: a[0][0][0][0][0]: nested deeper than 6 levels; no key of a spec is"),
        # rules over several keys
        ("residual: {store_sum: false, dtype: same}", f"4:37: residual.dtype: {NO_SUM}"),
        ("strategy: single_block\nhidden: [8192, 16384]", f"4:11: strategy: {NARROW}"),
        # syntax
        ("\tgrad: true", "4:1: not valid YAML: a tab cannot stand here; indent with spaces"),
        ("grad", "4:1: not valid YAML: a key needs a colon and a space after it"),
        ("grad: true: false", "4:11: not valid YAML: a second `key: value` in one line; put it on a line of its own"),
        ("  grad: true", "4:3: not valid YAML: the indentation does not fit the lines above"),
        ("save: [rstd", "5:1: not valid YAML: the file ends inside brackets"),
        ("grad: 'true", "5:1: not valid YAML: a quote is never closed"),
        ('grad: "\\q"', "4:9: not valid YAML: found unknown escape character 'q'"),
        ('grad: "\\UFFFFFFFF"', "4:10: not valid YAML: no such character or number"),
        ('grad: "\\ud800"', "4:7: grad: the character U+D800 is not allowed in a spec"),
        ('grad: "\\e"', "4:7: grad: the character U+001B is not allowed in a spec"),
    ],
)  # fmt: skip
def test_one_fault(line: str, said: str) -> None:
    assert faults(f"{BASE}{line}\n") == [f"s.yaml:{said}"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2norm", f"'2norm' {NAME}"),
        ("a-b", f"'a-b' {NAME}"),
        ("A", f"'A' {NAME}"),
        ("é", f"'é' {NAME}"),
        ("''", f"'' {NAME}"),
        ("010", f"'010' {NAME}"),
        ('"a\\nb"', f"'a\\nb' {NAME}"),
        ("class", "'class' is a keyword of Python; choose another name"),
        ("print", "'print' is a builtin of Python; choose another name"),
        ("torch", "'torch' is a name that the generated module uses itself; choose another name"),
        ("name", "'name' is a name that the generated module uses itself; choose another name"),
        ("true_", "True, the class that 'true_' makes, is a keyword of Python; choose another name"),
        ("value_error", "ValueError, the class that 'value_error' makes, is a builtin of Python; choose another name"),
        (
            "tensor_",
            "Tensor, the class that 'tensor_' makes, is a name that the generated module uses itself; choose "
            "another name",
        ),
        ("3", "write a word, not 3"),
        ("true", "write a word, not true"),
    ],
)
def test_names(name: str, said: str) -> None:
    assert faults(BASE.replace("name: a", f"name: {name}")) == [f"s.yaml:1:7: name: {said}"]


def test_no_keyword_is_a_name() -> None:
    """Nor does the class of its name become one: `none` would be None."""
    for word in {word.lower() for word in (*keyword.kwlist, *keyword.softkwlist)} - {"_"}:
        [said] = faults(BASE.replace("name: a", f"name: '{word}'"))
        named = repr(word) if keyword.iskeyword(word) or keyword.issoftkeyword(word) else word.capitalize()
        assert said.startswith(f"s.yaml:1:7: name: {named}")
        assert said.endswith(" is a keyword of Python; choose another name")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", f"1:1: eps: {NO_DEFAULT}; write `eps: {{value: 1e-6}}`. The constant in the root, and where it stands."),
        ("eps: 1e-6", "3:6: eps: write a mapping of the keys value, placement such as {value: 1e-6}, not 1e-6"),
        ("eps: {}", f"3:6: eps.value: {NO_VALUE}"),
    ],
)
def test_no_eps(line: str, said: str) -> None:
    assert faults(BASE.replace("eps: {value: 1e-6}", line)) == [f"s.yaml:{said}"]


def test_yaml_words_are_text() -> None:
    assert spec(BASE.replace("name: a", "name: no")).name == "no"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", f"s.yaml:1:1: {EMPTY}"),
        ("# only a comment\n", f"s.yaml:1:1: {EMPTY}"),
        ("---\n", f"s.yaml:1:1: {EMPTY}"),
        ("null\n", f"s.yaml:1:1: {EMPTY}"),
        ("- a\n", "s.yaml:1:1: a spec is a mapping of keys such as name, norm and eps, not a list"),
        ("\nrms\n", "s.yaml:2:1: a spec is a mapping of keys such as name, norm and eps, not rms"),
        ("%YAML 1.1\n---\n" + BASE, "s.yaml:1:1: directives (%YAML, %TAG) are not used in specs; leave them out"),
        ("%YAML 1." + "1" * 5000 + "\n---\n", "s.yaml:1:9: not valid YAML: no such character or number"),
        ("a: !" + "b" * 500 + "!c d\n", f"s.yaml:1:4: not valid YAML: found undefined tag handle '!{'b' * 59}...'"),
        ("name: \0\n", "s.yaml:1:7: the character U+0000 is not allowed in a spec"),
        ("name: a\r\nnorm: é\u2028\n", "s.yaml:2:8: the character U+2028 is not allowed in a spec"),
        (b"a: 1\nb: \xc3\xa9\xc3\n", "s.yaml:2:5: not UTF-8: byte 0xc3"),
        ("name: a".encode("utf-16"), "s.yaml:1:1: not UTF-8: byte 0xff"),
        (b"#" * (64 * 1024 + 1), "s.yaml: larger than 64 KiB; a spec is a page"),
    ],
)
def test_form(text: str | bytes, said: str) -> None:
    assert faults(text) == [said]


def test_all_faults_in_one_run() -> None:
    text = """\
nmae: a
norm: rsm
eps: {placement: inside}
hidden: [1024, ~]
affine:
  weight: yes
  offset: 1
  weight: no
save: [mean, mean]
residual: &r {dtype: *r}
grad:
"""
    assert faults(text) == [
        f"s.yaml:1:1: name: {NO_DEFAULT}. {Spec.model_fields['name'].description}",
        "s.yaml:1:1: nmae: unknown key; did you mean name?",
        "s.yaml:2:7: norm: write rms or layer, not rsm",
        f"s.yaml:3:6: eps.value: {NO_VALUE}",
        "s.yaml:3:18: eps.placement: write inside_sqrt or outside_sqrt, not inside",
        "s.yaml:4:16: hidden[1]: the value is missing; write one, or leave the key out",
        "s.yaml:6:11: affine.weight: write true or false, not yes",
        "s.yaml:7:3: affine.offset: unknown key; did you mean weight_offset?",
        "s.yaml:8:3: affine.weight: the key stands in line 6 already; keep one of the two",
        "s.yaml:9:7: save: mean is listed twice; list each statistic once",
        "s.yaml:10:11: residual: anchors (&name) are not used in specs; leave it out",
        "s.yaml:10:22: residual.dtype: aliases (*name) are not used in specs; write the value out",
        "s.yaml:11:6: grad: the value is missing; write one, or leave the key out",
    ]


def test_rules_over_several_keys_hold_whatever_else_is_wrong() -> None:
    text = """\
name: a
norm: rms
epsilon: 1e-6
dtypes: {input: []}
affine: {weight: false, weight_offset: 1e39}
residual: {store_sum: false, dtype: float32, norm_of: rounded_sum, in: 1}
save: [mean, mean]
hidden: [16384]
strategy: single_block
"""
    assert [said.split("; ")[0].removeprefix("s.yaml:") for said in faults(text)] == [
        f"1:1: eps: {NO_DEFAULT}",
        "3:1: epsilon: unknown key",
        "4:17: dtypes.input: the list is empty",
        "5:18: affine.weight: must be true: no norm in use has a shift without a scale",
        "5:40: affine.weight_offset: weight_offset must be finite in fp32, not 1e+39",
        "6:37: residual.dtype: dtype is the dtype of the stored sum, and store_sum is false",
        "6:55: residual.norm_of: store_sum is false, so the sum is never rounded",
        "6:68: residual.in: unknown key",
        "7:7: save: an RMS norm has no mean",
        "9:11: strategy: single_block keeps a row in registers, 8192 elements at most with grad, not 16384",
    ]
    # A rule is silent where it rests on a key that is not right by itself: it may be no fault then.
    text = f"{BASE}hidden: [16384]\nstrategy: single_block\ngrad: no\n"
    assert faults(text) == ["s.yaml:6:7: grad: write true or false, not no"]


@pytest.mark.parametrize(
    "text", [BASE.replace("\n", "\r\n"), BASE.replace("\n", "\r"), "\ufeff" + BASE, "---\n" + BASE]
)
def test_bom_and_line_ends(text: str) -> None:
    assert spec(text) == spec(BASE)


def test_messages_stay_short() -> None:
    long = "x" * 50_000
    for line in (f"{long}: 1", f"grad: {long}", f"affine: {long}", f"hidden: [{'1.5, ' * 9000}]"):
        assert max(map(len, faults(f"{BASE}{line}\n"))) < 300
    assert len(faults(BASE.replace("name: a", f"name: {long}"))[0]) < 300


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10_000_000,
        "a: &a [x,x,x]\n" + "".join(f"{k}: &{k} [{', '.join([f'*{j}'] * 9)}]\n" for j, k in pairwise("abcdefghi")),
        "[" * 65_000,
        "{a: " * 16_000,
        "- " * 32_000,
        "? " * 32_000,
        "".join(f"a{i}: 1\n" for i in range(7_000)),
        BASE + "save: [" + "x, ~, " * 10_000 + "]",
        BASE + "hidden: [" + ",".join(map(str, range(1, 10_000))) + ", 1]",
    ],
    ids=["big", "bomb", "brackets", "braces", "dashes", "question marks", "unknown keys", "holes", "widths"],
)
def test_hostile_files_are_refused_fast(text: str) -> None:
    start = time.perf_counter()
    assert faults(text)
    assert time.perf_counter() - start < 5


_pieces = st.sampled_from(
    [
        *"\n\t:-?[]{},&*!|>'\"%@`#~ \\\r\0",
        *("name", "norm", "eps", "value", "affine", "hidden", "save", "true", "1e-6", "010", ".inf", "none", "dynamic"),
        *("  ", ": ", "- ", "<<", "---\n", "...", "\ufeff", "\\ud800", "\\x", "é", "!!int", "0x"),
    ]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=60) | st.lists(_pieces, max_size=30).map(lambda pieces: "".join(pieces).encode()))
def test_any_bytes_give_a_spec_or_faults(data: bytes) -> None:
    for text in (data, BASE.encode() + data):
        try:
            found = load(text, "s.yaml")
        except SpecError as error:
            said = [str(fault) for fault in error.faults]
        else:
            said = [found.name]
        assert said
        assert not any("\n" in line for line in said)


_values = st.recursive(
    st.sampled_from(["1", "true", "none", "abc", "1e-6", "'1'", "010", "[]", "{}", "same", "rstd", "dynamic"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(["value", "weight", "bias", "input", "dtype", "x"]), inner, max_size=3).map(
            lambda items: f"{{{', '.join(f'{key}: {value}' for key, value in items.items())}}}"
        )
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from([*Spec.model_fields, "x"]), _values))
def test_no_jargon_and_every_fault_has_a_place(items: dict[str, str]) -> None:
    text = "".join(f"{key}: {value}\n" for key, value in items.items()) or "{}"
    found = []
    try:
        spec(text)
    except SpecError as error:
        found = error.faults
    for fault in found:
        assert fault.line >= 1
        assert fault.column >= 1
        assert "Input" not in fault.message
        assert "should" not in fault.message


def test_digest_is_of_the_meaning() -> None:
    spelled_out = "# a comment\neps: {placement: inside_sqrt, value: 0.000001}\nnorm: rms\nname: a\nresidual: none\n"
    assert spec(spelled_out).digest == spec(BASE).digest
    assert spec(BASE.replace("1e-6", "1e-5")).digest != spec(BASE).digest


def test_fault_at_is_at_the_value() -> None:
    assert str(fault_at(BASE.encode(), "s.yaml", "eps.value", "no")) == "s.yaml:3:14: eps.value: no"
    assert str(fault_at(BASE.encode(), "s.yaml", "eps.placement", "no")) == "s.yaml:3:6: eps.placement: no"


def test_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.yaml"
    file.write_bytes(b"#" * 100_000)
    assert len(read(file)) == 64 * 1024 + 1
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "rms.yaml").touch()
    for path, said in [
        (tmp_path / "none.yaml", "cannot be read: no such file or directory"),
        (tmp_path, "a folder; name the spec files in it"),
        (tmp_path / "pipe", "not a regular file"),
        (file / "below", "cannot be read: not a directory"),
        (Path(__file__), "a spec is a .yaml file"),
        (Path("rms"), "cannot be read: no such file or directory; did you mean specs/rms.yaml?"),
    ]:
        with pytest.raises(SpecError) as caught:
            read(path)
        assert str(caught.value) == f"{path}: {said}"
