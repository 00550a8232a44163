"""`normgen inspect`: what it reports of compiled kernels, how it fails, and how it reads assembly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from normgen.assembly import access_bits, amd_usage
from normgen.cli import main
from normgen.target import LADDERS, TARGETS, Tile

ROOT = Path(__file__).parents[1]
SPEC = """\
name: narrow
norm: rms
eps: {value: 1e-6}
grad: false
"""
FIXED = SPEC.replace("narrow", "fixed") + "hidden: 256\ndtypes: {input: [float16, bfloat16], weight: [float32]}\n"


@pytest.fixture(autouse=True)
def _specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    Path("narrow.yaml").write_text(SPEC)
    Path("fixed.yaml").write_text(FIXED)


def tile(width: int) -> Tile:
    """What the specs of this file are launched with, forward."""
    return next(rung for rung in LADDERS["rms", False].forward if width <= rung.widest)


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the other tests import Triton to interpret."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env)


def test_json() -> None:
    done = python("-m", "normgen", "inspect", "fixed.yaml", "--target", "cuda:90", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    kernels = report.pop("kernels")
    assert report == {"faults": []}
    assert [one["constants"]["EARLY"] for one in kernels] == [False, True]  # many rows, and few
    rung = tile(256)
    columns = min(rung.columns, 256)
    for one in kernels:
        registers, shared = one.pop("registers"), one.pop("shared")
        assert 16 <= registers <= 255
        assert 0 <= shared <= 1024
        occupancy, limit = TARGETS["cuda:90"].occupancy(registers, shared, rung.warps)
        assert one == {
            "spec": "fixed.yaml",
            "kernel": "fixed_forward",
            "target": "cuda:90",
            "width": 256,
            "dtype": "bfloat16",
            "weight_dtype": "float32",
            "constants": {
                "H": 256,
                "ALIGNMENT": 16,
                "BLOCK_N": rung.elements // 256,
                "BLOCKS": 256 // columns,
                "BLOCK_SIZE": columns,
                "EARLY": one["constants"]["EARLY"],
            },
            "num_warps": rung.warps,
            "num_stages": 3,
            "spills": 0,
            "load_bits": 128,
            "accesses": {"x_ptr": 128, "out_ptr": 128},
            "aligned": ["x_ptr", "out_ptr"],
            "occupancy": occupancy,
            "limit": limit,
            "findings": [],
        }


def test_text_and_processes() -> None:
    widths = [str(width) for width in range(8, 80, 8)]
    arguments = ["narrow.yaml", "--target", "cuda:80", "--dtype", "float32", "--jobs", "2", "--width", *widths, "100"]
    done = python("-m", "normgen", "inspect", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    title, head, *rows = done.stdout.splitlines()
    assert title == "narrow.yaml: x float32, weight float32; cuda:80"
    assert head.split()[:8] == ["kernel", "width", "warps", "stages", "registers", "spills", "shared", "load_bits"]
    cells = [row.split() for row in rows]
    warps = {width: str(tile(int(width)).warps) for width in (*widths, "100")}
    # Each for many rows, and for few.
    assert [row[:4] for row in cells[::2]] == [["narrow_forward", width, warps[width], "3"] for width in warps]
    assert [row[:4] for row in cells[1::2]] == [row[:4] for row in cells[::2]]
    assert {(row[5], row[7]) for row in cells} == {("0", "128")}
    end = head.index("load_bits") + len("load_bits")
    assert {line[end - 4 : end + 1] for line in rows} == {" 128 "}


CALLED = """
import sys
import normgen.inspect
from normgen.cli import main

compile_, compiled = normgen.inspect._compile, []
def counted(launch, target):
    compiled.append(launch.kernel)
    return compile_(launch, target)
normgen.inspect._compile = counted
{change}
code = main(sys.argv[1:])
print(compiled)
sys.exit(code)
"""


def test_equal_kernels_are_compiled_once() -> None:
    Path("copy.yaml").write_text(SPEC.replace("narrow", "again"))
    command = ["inspect", "narrow.yaml", "copy.yaml", "--target", "hip:gfx942", "--width", "64"]
    done = python("-c", CALLED.format(change=""), *command)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, compiled = done.stdout.splitlines()
    assert compiled == "['narrow_forward', 'narrow_forward']"
    narrow, again = ([row.split()[1:] for row in lines if row.startswith(name)] for name in ("narrow_", "again_"))
    assert len(narrow) == 2
    assert narrow == again


def test_spills_are_a_finding() -> None:
    """Rows of 8192 in the registers of one warp cannot be held."""
    change = """
from normgen.target import LADDERS
ladders = LADDERS["rms", False]
wide = ladders.forward[-1].model_copy(update={"widest": 16384, "columns": 8192, "elements": 8192, "warps": 1})
LADDERS["rms", False] = ladders.model_copy(update={"forward": [wide]})  # unasked by the rules of the models
"""
    command = ["inspect", "narrow.yaml", "--target", "cuda:90", "--width", "8192", "--format", "json"]
    done = python("-c", CALLED.format(change=change), *command)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout.removesuffix("['narrow_forward', 'narrow_forward']\n"))
    for one, fault in zip(report["kernels"], report["faults"], strict=True):
        assert one["spills"] > 0
        assert (fault["path"], fault["key"]) == ("narrow.yaml", "narrow_forward")
        spilled = f"it spills {one['spills']} bytes a thread, with {one['registers']} registers"
        assert fault["message"] == f"at width 8192 in bfloat16 on cuda:90, {spilled}"


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What goes to stderr, of a command that cannot do its work."""
    try:
        code = main(["inspect", *argv])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return err


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "'cuda:70' is no target; write cuda:80, cuda:90, cuda:100 or hip:gfx942\n"
    assert inspect(capsys, "narrow.yaml", "--target", "cuda:70").endswith(f"error: argument --target: {sentence}")
    for option, value, message in [
        ("--width", "0", "'0' is no whole number from 1 to 1048576"),
        ("--jobs", "many", "'many' is no whole number from 1 to 1024"),
    ]:
        err = inspect(capsys, "narrow.yaml", "--target", "cuda:90", option, value)
        assert err.endswith(f"error: argument {option}: {message}\n")


def test_missing_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is imported here: other tests of this process want a Triton that interprets.
    for name, found in [("torch", {"torch": None}), ("triton", {"torch": ModuleType("torch"), "triton": None})]:
        for package, module in found.items():
            monkeypatch.setitem(sys.modules, package, module)
        assert inspect(capsys, "narrow.yaml", "--target", "cuda:90") == (
            f"{name}: not installed, and kernels cannot be inspected without it; run: pip install torch triton\n"
        )


def test_interpreted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert inspect(capsys, "narrow.yaml", "--target", "cuda:90") == (
        "TRITON_INTERPRET: it is set, and kernels would be interpreted, not compiled; unset it\n"
    )


def test_a_ladder_of_one_rung() -> None:
    script = """
from normgen.launches import calls
from normgen.loader import load

text = b"name: a\\nnorm: rms\\neps: {value: 1e-6}\\nresidual: {}\\nstrategy: welford\\n"
print(sorted({call.width for call in calls({"a.yaml": load(text, "a.yaml")})}))
"""
    done = python("-c", script)
    assert done.stderr == ""
    assert done.stdout == "[65536, 131072]\n"  # the one of forward, and two of backward, one of them as wide


def test_rows_of_twice_the_bytes_have_half_the_programs() -> None:
    """A packed row of 4 bytes an element takes twice the registers; where one program has them all, slabs take it."""
    script = """
import sys
from pathlib import Path

from normgen.launches import calls, launches
from normgen.loader import load_at

specs = {path: load_at(Path(path)) for path in sys.argv[1:]}
for dtype in ("bfloat16", "float32"):
    for call in calls(specs, dtype=dtype, widths=[32768, 65536]):
        if call.rows > 1:
            one = launches(call, "cuda:90")[0]
            print(dtype, call.width, one.kernel, one.options["num_warps"], one.options["maxnreg"])
"""
    done = python("-c", script, str(ROOT / "specs" / "layernorm_residual.yaml"))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "bfloat16 32768 layernorm_residual_forward_chunked 16 64",
        "bfloat16 65536 layernorm_residual_forward_chunked 32 64",
        "float32 32768 layernorm_residual_forward_chunked 16 128",
        "float32 65536 layernorm_residual_forward_staged 4 255",
    ]


def test_what_a_spec_does_not_take() -> None:
    script = """
from normgen.errors import SpecError
from normgen.launches import calls
from normgen.loader import load

specs = {path: load(open(path, "rb").read(), path) for path in ("fixed.yaml", "narrow.yaml")}
for asked in ({"dtype": "float32", "widths": [256, 512]}, {"weight_dtype": "float16"}):
    try:
        calls(specs, **asked)
    except SpecError as error:
        print(error)
"""
    done = python("-c", script)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "fixed.yaml: dtypes.input: x of float32 is not taken; inspect float16 or bfloat16",
        "fixed.yaml: hidden: the width 512 is not taken; inspect 256",
        "fixed.yaml: dtypes.weight: a weight of float16 with x of bfloat16 is not taken; inspect float32",
        "narrow.yaml: dtypes.weight: a weight of float16 with x of bfloat16 is not taken; inspect bfloat16 or float32",
    ]


@pytest.mark.parametrize(
    "target, registers, shared, warps, expected",
    [
        ("cuda:90", 16, 0, 1, (32, "programs")),
        ("cuda:90", 32, 0, 8, (8, "warps")),
        ("cuda:90", 56, 0, 2, (18, "registers")),  # 9 warps in each of four files of 16384
        ("cuda:90", 57, 0, 8, (4, "registers")),  # rounded up to 64: 8 warps in each file
        ("cuda:80", 255, 0, 16, (0, "registers")),
        ("cuda:80", 32, 40 * 1024, 4, (4, "shared")),  # 164 KiB, and each takes one more than it asks for
        ("cuda:80", 32, 163 * 1024 + 1, 4, (0, "shared")),
        ("hip:gfx942", 128, 0, 4, (4, "registers")),  # 4 warps in each of four files of 512
        ("hip:gfx942", 64, 20 * 1024, 4, (3, "shared")),
        ("hip:gfx942", 64, 0, 1, (32, "warps")),
    ],
)
def test_occupancy(target: str, registers: int, shared: int, warps: int, expected: tuple[int, str]) -> None:
    assert TARGETS[target].occupancy(registers, shared, warps) == expected


KERNEL = dedent("""\
    @triton.jit
    def kernel(x_ptr, y_ptr, partial_ptr, stride, WIDTH: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, WIDTH)[None, :].to(tl.int64)
        dtype = x_ptr.dtype.element_ty
        start = x_ptr + row * stride
        here = tl.multiple_of(start, 16) + lane
        x = tl.load(here, mask=lane < stride)
        first = tl.load(start)
        tl.store(
            y_ptr + row * stride + lane,
            (x - first).to(dtype),
        )
        tl.store(partial_ptr + lane, x)
""")
PTX = """
\t.loc\t1 107 5
\tld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];
\tld.global.L1::evict_first.v2.b32 {%r1, %r2}, [ %rd1 + 0 ];
\t.loc\t1 108 5
\tld.global.b16 %rs1, [ %rd1 + 0 ];
\t.loc\t2 107 5
\tld.global.b8 %rs1, [ %rd1 + 0 ];
\t.loc\t1 109 5
\tst.global.v4.b32 [ %rd1 + 0 ], {%r1, %r2, %r3, %r4};
\t.loc\t1 113 5
\tst.global.b32 [ %rd1 + 0 ], %r1;
"""


def test_accesses_to_columns() -> None:
    """Of the kernel, which starts at line 100, lines 107, 109 to 112 and 113 access columns."""
    names = {"x_ptr", "y_ptr", "partial_ptr"}
    assert access_bits(KERNEL, 100, PTX, names, {"y_ptr"}) == {"x_ptr": 64, "y_ptr": 128}
    assert access_bits(KERNEL, 100, PTX, names, names) == {"x_ptr": 64, "y_ptr": 128, "partial_ptr": 32}
    assert access_bits(KERNEL, 100, "", names, names) == dict.fromkeys(names, 0)
    copied = "\t.loc 1 107 5\n\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\n"
    assert access_bits(KERNEL, 100, copied, {"x_ptr"}, ()) == {"x_ptr": 128}
    asked = "\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r2;\n"
    for inlined in (
        "\t.loc\t1 20 5, function_name $L__info_string0, inlined_at 1 107 13 // norm.py:20:5\n",
        "\t.loc\t1 20 34                        // norm.py:20:34 @[ norm.py:107:72 ]\n",  # of Triton 3.6
    ):
        assert access_bits(KERNEL, 100, inlined + asked, {"x_ptr"}, ()) == {"x_ptr": 64}
    elsewhere = "\t.loc\t1 20 34                        // norm.py:20:34 @[ other.py:107:72 ]\n"
    assert access_bits(KERNEL, 100, elsewhere + asked, {"x_ptr"}, ()) == {"x_ptr": 0}
    amd = (
        "\t.loc\t1 107 5\n\tbuffer_load_dwordx4 v[0:3], v0, s[0:3], 0 offen\n\tglobal_load_dwordx2 v[0:1], v0, s[0:1]\n"
    )
    assert access_bits(KERNEL, 100, amd, {"x_ptr"}, ()) == {"x_ptr": 64}


HELPED = dedent("""\
    @triton.jit
    def kernel(x_ptr, y_ptr, stride, WIDTH: tl.constexpr):
        row = tl.program_id(0)
        rows = x_ptr + row * stride
        first = tl.load(rows)
        for start in tl.range(0, stride, WIDTH):
            col, mask = columns(start, WIDTH)
            x = tl.load(rows + col, mask=mask)
            tl.store(y_ptr + row * stride + col, x - first, mask=mask)
""")
HELPER = "def columns(start, WIDTH):\n    col = start + tl.arange(0, WIDTH)[None, :]\n    return col, col < 8\n"


def test_columns_from_a_helper() -> None:
    """Lines 107 and 108 of the kernel access columns that a function returned, with their mask."""
    text = (
        "\t.loc\t1 104 5\n\tld.global.b16 %rs1, [ %rd1 + 0 ];\n"
        "\t.loc\t1 107 5\n\tld.global.v2.b32 {%r1, %r2}, [ %rd1 + 0 ];\n"
        "\t.loc\t1 108 5\n\tst.global.v4.b32 [ %rd1 + 0 ], {%r1, %r2, %r3, %r4};\n"
    )
    names = {"x_ptr", "y_ptr"}
    assert access_bits(HELPED, 100, text, names, names, {"columns": HELPER}) == {"x_ptr": 64, "y_ptr": 128}
    assert access_bits(HELPED, 100, "", names, names, {"columns": HELPER}) == {"x_ptr": 0, "y_ptr": 0}
    # What returns no columns, or is not called, spreads nothing.
    assert access_bits(HELPED, 100, text, names, names, {"columns": "def columns(a, b):\n    return a, b\n"}) == {}
    assert access_bits(HELPED, 100, text, names, names, {"other": HELPER}) == {}
    assert access_bits(HELPED, 100, text, names, names) == {}


STAGED = dedent("""\
    @gluon.jit
    def kernel(x_ptr, y_ptr, stride, WIDTH: tl.constexpr, POST: tl.constexpr):
        col = columns(0, WIDTH)
        _stage(ring, x_ptr + stride + col)
        _stage(ring, y_ptr + stride + col)
        if POST:
            tl.store(x_ptr + col, 1)
        else:
            tl.store(y_ptr + col, 1)
""")


def test_columns_that_a_helper_loads() -> None:
    """Lines 103 and 104 hand addresses to a function, whose copies the compiler says were inlined there."""
    inlined = "\t.loc\t1 9 5, function_name $L__info_string0, inlined_at 1 {} 9\n"
    copy = "\tcp.async.cg.shared.global.L2::cache_hint [ %r1 + 0 ], [ %rd1 + 0 ], {}, %r2, %rd2;\n"
    text = inlined.format(103) + copy.format("0x10") + inlined.format(104) + copy.format("0x8")
    arguments = (STAGED, 100, text, {"x_ptr", "y_ptr"}, (), {"columns": HELPER}, {})
    assert access_bits(*arguments, {"_stage"}) == {"x_ptr": 128, "y_ptr": 64}
    assert access_bits(*arguments) == {}


@pytest.mark.parametrize("post", [True, False])
def test_what_a_constant_rules_out_is_not_looked_for(post: bool) -> None:
    stored = access_bits(STAGED, 100, "", (), {"x_ptr", "y_ptr"}, {"columns": HELPER}, {"POST": post})
    assert stored == {"x_ptr" if post else "y_ptr": 0}


def test_usage_of_amd() -> None:
    text = ".private_segment_fixed_size: 12\n.sgpr_spill_count: 1\n.vgpr_count:     40\n.vgpr_spill_count: 4\n"
    assert amd_usage(text) == (40, 20)
    with pytest.raises(AssertionError, match="no vgpr_count"):
        amd_usage(".vgpr_spill_count: 0\n.sgpr_spill_count: 0\n.private_segment_fixed_size: 0\n")
