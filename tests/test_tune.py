"""Tables of launch parameters, and the search that makes them: all of it but the GPU."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normgen.cli import main
from normgen.errors import SpecError
from normgen.loader import load, read_table, table_path
from normgen.plan import plan
from normgen.render import render, solve
from normgen.spec import Spec, TunedSpec
from normgen.target import LADDERS, REGISTERS, THREADS, WIDEST, Chunk, Slab, Table, Tile
from normgen.tune.bench import NAMES, Bench
from normgen.tune.candidates import Space, default, space
from normgen.tune.merge import grid, merged
from normgen.tune.progress import Progress
from normgen.tune.raw import Raw
from normgen.tune.run import table_text, tune
from normgen.tune.search import WIDTHS, Options, search

ROOT = Path(__file__).resolve().parents[1]
SPECS = sorted((ROOT / "specs").glob("*.yaml"))
TEXT = "name: a\nnorm: rms\neps: {value: 1e-6}\n"
TABLE = """\
gpu: NVIDIA H200
torch: "2.13.0"
triton: "3.6.0"
dtype: bfloat16
elements: 134217728
forward:
- {widest: 1024, columns: 1024, elements: 2048, warps: 2, measured: [[512, 0.9], [1024, 0.93]]}
- {widest: 6000, columns: 1024, elements: 6144, warps: 4}
chunks:
- {widest: 32768, columns: 4096, warps: 16}
- {widest: 65536, columns: 4096, warps: 16, programs: 4}
forward_slabs:
- {widest: null, columns: 8192, warps: 8, programs: 3, stages: 4}
backward:
- {widest: 4096, columns: 4096, elements: 4096, warps: 8, stages: 3, programs: 2}
backward_slabs:
- {widest: null, columns: 4096, warps: 4, programs: 2, stages: 5, measured: [[8192, 1]]}
"""


def tuned(text: str = TEXT, table: str = TABLE) -> Spec:
    return load(text.encode(), "s.yaml", (table.encode(), "tuned/s.yaml"))


def faults(table: str, text: str = TEXT) -> list[str]:
    with pytest.raises(SpecError) as caught:
        tuned(text, table)
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "elements: 134217728\n",
            "",
            "tuned/s.yaml:1:1: elements: the key is missing, and has no default. Elements of",
        ),
        ("dtype: bfloat16", "dtype: int8", "4:8: dtype: write float16, bfloat16 or float32, not int8"),
        ("NVIDIA H200", '"a\\"b"', "1:6: gpu: 'a\"b' is no name; write up to 48 of: letters, digits, spaces"),
        ("backward_slabs:", "backward_slab:", "backward_slab: unknown key; did you mean backward_slabs"),
        ("elements: 2048", "element: 2048", "7:33: forward[0].element: unknown key; did you mean elements?"),
        ("elements: 2048", "elements: 2e3", "7:43: forward[0].elements: write a whole number such as 4096, not 2e3"),
        ("elements: 2048", "elements: 512", "forward[0].elements: a tile of 512 elements is less than a block of 1024"),
        (
            "widest: 1024, columns: 1024",
            "widest: 1024, columns: 1000",
            "7:27: forward[0].columns: must be a power of two",
        ),
        ("warps: 2,", "warps: 3,", "forward[0].warps: must be a power of two, not 3; 2 is one"),
        ("warps: 2,", "warps: 64,", "forward[0].warps: a program has at most 32 warps, not 64"),
        (
            "elements: 2048",
            "elements: 32768",
            "forward[0].warps: 32768 elements are 512 registers for each thread of 64",
        ),
        ("{widest: 6000", "{widest: 1000", "8:12: forward[1].widest: rungs go from narrow to wide, and the one before"),
        ("{widest: 6000", "{widest: null", "8:12: forward[1].widest: a tile holds whole rows, so there is a widest"),
        ("{widest: 6000", "{widest:", "8:11: forward[1].widest: the value is missing"),
        ("elements: 6144", "elements: null", "forward[1].elements: the value is missing"),
        ("{widest: null, columns: 8192", "{widest: 9, columns: 8192", "forward_slabs[0].widest: the last rung takes"),
        ("programs: 4}", "programs: 8}", "chunks[1].programs: 8 programs of 16 warps are 4096 threads, and a multi"),
        ("stages: 3, programs: 2", "stages: 3", "15:3: backward[0].programs: the backward grid is persistent"),
        ("stages: 3", "stages: 9", "backward[0].stages: must be from 1 to 8, not 9"),
        (
            "widest: null, columns: 4096, warps",
            "widest: null, columns: 2, warps",
            "backward_slabs[0].columns: a program owns at least",
        ),
        ("stages: 5", "stages: 1", "17:64: backward_slabs[0].stages: must be from 2 to 16, not 1"),
        (
            ", stages: 4}",
            "}",
            "13:3: forward_slabs[0].stages: the key is missing, and has no default. Rows on their way",
        ),
        ("[[8192, 1]]", "[8192, 1]", "17:77: backward_slabs[0].measured: [8192, 1] is no list of widths and shares"),
        (TABLE, "gpu", "1:1: a table is a mapping of keys such as gpu, forward and chunks, not gpu"),
        (TABLE, "", "1:1: the file is empty; `normgen tune` writes it, or remove it"),
    ],
)
def test_faults_of_a_table(old: str, new: str, said: str) -> None:
    assert old in TABLE
    found = faults(TABLE.replace(old, new, 1))
    assert any(said in fault for fault in found), found
    assert all(fault.startswith("tuned/s.yaml:") for fault in found)


def test_faults_of_spec_and_table_are_said_together() -> None:
    found = faults(TABLE.replace("warps: 2,", "warps: 3,"), TEXT.replace("rms", "rsm"))
    assert [fault.split(":")[0] for fault in found] == ["s.yaml", "tuned/s.yaml"]


def test_tiles_reach_all_rows_of_a_spec_that_has_nothing_else() -> None:
    single = TEXT + "strategy: single_block\nhidden: 5000\n"
    assert faults(TABLE, single) == [
        "tuned/s.yaml:15:1: backward: strategy single_block launches tiles only, and none takes rows of 5000; "
        "add one, or tune anew"
    ]
    assert tuned(single + "grad: false\n")


def test_a_table_counts_in_the_digest() -> None:
    plain = load(TEXT.encode(), "s.yaml")
    digests = {plain.digest, tuned().digest, tuned(table=TABLE.replace("warps: 2,", "warps: 4,")).digest}
    assert len(digests) == 3
    assert tuned(table="# a comment\n" + TABLE).digest == tuned().digest
    assert isinstance(tuned(), TunedSpec)
    assert not isinstance(plain, TunedSpec)


def test_a_table_is_rendered() -> None:
    text = render(plan(tuned()), "s.yaml")["a.py"]
    assert "# Tuned on NVIDIA H200: bfloat16, 134217728 elements.\n" in text
    assert "- rungs are those that normgen tune found on NVIDIA H200, bfloat16\n" in text
    assert "_FORWARD_TILES = (\n    (1024, 1024, 2048, 2),\n    (6000, 1024, 6144, 4),\n)\n" in text
    assert "_CHUNKS = (\n    (32768, 4096, 16, 1),\n    (65536, 4096, 16, 4),\n)\n" in text
    assert "_FORWARD_SLABS = ((None, 8192, 8, 3, 4),)\n" in text
    assert "_BACKWARD_TILES = ((4096, 4096, 4096, 8, 3, 2),)\n" in text
    assert "_BACKWARD_SLABS = ((None, 4096, 4, 2, 5),)\n" in text


def test_defaults_keep_the_rules_of_tables() -> None:
    facts = {"gpu": "x", "torch": "1", "triton": "1", "dtype": "float32", "elements": 1}
    for ladders in LADDERS.values():
        table = Table.model_validate(facts | ladders.model_dump())
        again = tuned(table=table_text(table, "a", "specs/a.yaml"))
        assert isinstance(again, TunedSpec)
        assert again.table == table


def test_build_and_check_take_the_table_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs" / "tuned").mkdir(parents=True)
    Path("specs/a.yaml").write_text(TEXT)
    assert main(["build", "specs/a.yaml"]) == 0
    assert main(["check"]) == 0
    table_path(Path("specs/a.yaml")).write_text(TABLE)
    assert main(["check"]) == 1
    assert main(["build", "specs/a.yaml"]) == 0
    assert main(["check"]) == 0
    assert "_BACKWARD_TILES = ((4096, 4096, 4096, 8, 3, 2),)\n" in Path("generated/a.py").read_text()
    assert main(["build", "specs/tuned/a.yaml"]) == 2
    assert "specs/tuned/a.yaml: the table of a spec, and no spec; name specs/a.yaml instead" in capsys.readouterr().err
    Path("specs/tuned/b.yaml").write_text(TABLE)
    capsys.readouterr()
    assert main(["check"]) == 1
    assert "specs/tuned/b.yaml: a table without its spec; run: rm specs/tuned/b.yaml" in capsys.readouterr().err
    Path("specs/tuned/b.yaml").unlink()
    Path("specs/tuned/a.yaml").write_text("gpu: 1\n")
    assert main(["check"]) == 2
    assert main(["list"]) == 2
    assert "specs/tuned/a.yaml:1:6: gpu: write a word, not 1" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    path = tmp_path / "a.yaml"
    path.write_text(TEXT)
    assert main(["tune", str(path)]) == 2
    assert capsys.readouterr().err == "normgen tune: measures on a GPU, and torch finds none here\n"
    assert main(["tune", str(path), "--dry-run", "--width", "128", "--format", "json"]) == 0
    assert re.search(r"a: \d+ candidates at 1 widths", capsys.readouterr().out)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_candidates_keep_the_limits(path: Path) -> None:
    found = search(load(path.read_bytes(), str(path)), str(path), Options())
    assert found.widths
    for width in found.widths:
        candidates = list(found.todo(width))
        assert len(set(candidates)) == len(candidates)
        assert len(candidates) < 550
        for ladder in found.space.ladders:
            for launch in found.space.launches(ladder, width):
                rung = found.space.rung(ladder, launch, width)
                assert found.space.effective(ladder, rung, width) == launch
                held = rung.elements if isinstance(rung, Tile) else rung.columns
                assert 8 <= held / (rung.warps * 32) <= 64
                assert max(1, rung.programs) * rung.warps * 32 <= THREADS
                assert max(1, rung.programs) * held <= REGISTERS
                if isinstance(rung, Slab):  # rows of at least 2 bytes an element, and a KiB for each program itself
                    assert rung.programs * (rung.stages * rung.columns * 2 + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("rows", "columns", "programs", "stages"),
    [
        (1, 8192, 2, 3),
        (1, 4096, 2, 5),
        (1, 8192, 1, 5),
        (4, 8192, 1, 2),
        (8192, 1, 1, 2),  # as many bytes of statistics as of rows
        (1, 32768, 2, 1),
        (1, 8192, 16, 1),
        (1, 8192, 32, 1),
    ],
)
def test_tiles_on_their_way_have_room(rows: int, columns: int, programs: int, stages: int) -> None:
    """Of 6 bytes a column, in 227 KiB, of which a program keeps 12 for other things; the launcher counts the same."""
    roomy = Space(ladders=("backward",), itemsize=2, row_bytes=6, held=5)
    assert roomy.stages(rows, columns, programs) == stages
    tile = rows * (6 * columns + 16)
    assert stages == 1 or (stages - 1) * tile <= 227 * 1024 // programs - 12 * 1024
    text = render(plan(load(TEXT.encode(), "s.yaml")), "s.yaml")["a.py"]
    assert "room = _shared_memory(device) // per_multiprocessor - 12288\n" in text
    assert "1 + room // (BLOCK_N * (BLOCKS * BLOCK_SIZE * row_bytes + 16))" in text


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_candidates_are_spelled_as_the_module_spells_rungs(path: Path) -> None:
    made = plan(load(path.read_bytes(), str(path)))
    kernels = solve(made)
    text = render(made, path.name)[f"{made.spec.name}.py"]
    space_ = space(kernels, made.spec.dtypes.input[0])
    for ladder in space_.ladders:
        direction = made.backward if "backward" in ladder else made.forward
        assert direction
        kind = {"forward": "tiles", "backward": "tiles", "chunks": "chunks"}.get(ladder, "slabs")
        for rung in getattr(direction, kind):
            widest = None if rung.widest == WIDEST else rung.widest
            assert str((widest, *space_.literal(ladder, rung))) in text.split(f"\n{NAMES[ladder]} = ")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "float16"}, "the spec takes no x of float16; write --dtype bfloat16"),
        ({"widths": (77,)}, "the spec takes no rows of 77; --width must be one of 40, 50"),
    ],
)
def test_what_a_spec_does_not_take(arguments: dict[str, Any], said: str) -> None:
    spec = load((TEXT + "hidden: [40, 50]\ndtypes: {input: [bfloat16]}\n").encode(), "s.yaml")
    with pytest.raises(SpecError, match=re.escape(said)):
        search(spec, "s.yaml", Options(**arguments))
    assert search(spec, "s.yaml", Options()).widths == (40, 50)


# Merging: a space and ladders of its own, in which backward is not of interest.
SPACE = Space(ladders=("forward", "chunks"), itemsize=2, row_bytes=4, held=5)
ALL = LADDERS["rms", False].model_copy(
    update={
        "forward": [
            Tile(widest=256, columns=256, elements=1024, warps=1),
            Tile(widest=2048, columns=2048, elements=2048, warps=2),
            Tile(widest=4096, columns=4096, elements=4096, warps=4),
            Tile(widest=8192, columns=8192, elements=8192, warps=8),
        ],
        "chunks": [
            Chunk(widest=16384, columns=4096, warps=16),
            Chunk(widest=65536, columns=8192, warps=32),
            Chunk(widest=WIDEST, columns=8192, warps=32, programs=2),
        ],
    }
)


def spread(widths: list[int], speed: Callable[[str, tuple[int, ...], int], float]) -> dict[Any, float]:
    return {
        (width, ladder, launch): speed(ladder, launch, width)
        for width in widths
        for ladder in SPACE.ladders
        for launch in SPACE.launches(ladder, width)
    }


def shape(rungs: list[Any]) -> list[tuple[int, ...]]:
    return [(rung.widest, *(getattr(rung, name) for name in ("columns", "warps"))) for rung in rungs]


def test_neighbours_share_a_rung() -> None:
    widths = [1024, 2048, 4096, 8192, 16384]

    def speed(ladder: str, launch: tuple[int, ...], width: int) -> float:
        if ladder == "chunks":
            return 0.9 if width > 8192 and launch == (4096, 16, 1) else 0.5
        rows, _, warps = launch
        # 1024 and 2048 agree within 1 %, 4096 and 8192 want 8 warps each.
        best = {1024: 4, 2048: 4, 4096: 8, 8192: 8, 16384: 0}[width]
        return (0.9 if warps == best and rows == max(1, 2048 // width) else 0.6) - 0.005 * (width == 1024)

    found = merged(SPACE, ALL, "forward", widths, spread(widths, speed))
    assert shape(found["forward"]) == [(2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 8)]
    assert shape(found["chunks"]) == [(WIDEST, 4096, 16)]
    assert found["forward"][0].measured == [(1024, 0.895), (2048, 0.9)]
    assert found["chunks"][0].measured == [(16384, 0.9)]


def test_no_width_loses_more_than_a_hundredth() -> None:
    widths = list(WIDTHS)

    def speed(ladder: str, launch: tuple[int, ...], width: int) -> float:
        noise = zlib.crc32(repr((ladder, launch, width)).encode()) % 1000 / 2000
        return 0.5 + noise if (ladder == "chunks") == (width > 8192) else 0.4

    raw = spread(widths, speed)
    found = merged(SPACE, ALL, "forward", widths, raw)
    served = dict(pair for rungs in found.values() for rung in rungs for pair in rung.measured)
    assert sorted(served) == widths
    for width in widths:
        best = max(share for (at, _, _), share in raw.items() if at == width)
        assert served[width] >= 0.99 * best - 0.001
    # Chunks can be what they are at any width, so that few rungs lose little where a hundredth is allowed.
    same = spread(widths, lambda ladder, launch, width: 0.9 if ladder == "chunks" else 0.4 + 0.5 * (width < 2048))
    assert len(merged(SPACE, ALL, "forward", widths, same)["chunks"]) == 1


def test_packed_rows_are_tried_where_registers_hold_them() -> None:
    """The whole row, two elements of 2 bytes a register, beside 24 for the rest."""
    for width in (12288, 65536):
        launches = dataclasses.replace(SPACE, packed=2).launches("chunks", width)
        assert launches
        for columns, warps, programs in launches:
            held = -(-width // columns) * columns // (2 * 32 * warps)
            assert held + 24 <= min(255, 65536 // (32 * warps * programs))
    assert (16384, 32, 1) in launches and not any(warps * programs > 32 for _, warps, programs in launches)
    assert not dataclasses.replace(SPACE, packed=4).launches("chunks", 65536)  # twice the bytes have no room


def test_the_crossing_lies_where_chunks_become_faster() -> None:
    widths = [2048, 4096, 8192, 16384]
    raw = spread(widths, lambda ladder, launch, width: 0.9 if (ladder == "chunks") == (width > 2048) else 0.7)
    found = merged(SPACE, ALL, "forward", widths, raw)
    assert [rung.widest for rung in found["forward"]] == [2048]
    assert [rung.widest for rung in found["chunks"]] == [WIDEST]


def test_what_was_not_tried_keeps_its_rung() -> None:
    raw = {(1024, "forward", (2, 1024, 4)): 0.95}
    widths = grid(SPACE, ALL, [1024], 2**20)
    assert widths == [256, 1024, 2048, 4096, 8192, 16384, 65536, 2**20]
    found = merged(SPACE, ALL, "forward", widths, raw)
    assert shape(found["forward"]) == [
        (256, 256, 1),
        (1024, 1024, 4),
        (2048, 2048, 2),
        (4096, 4096, 4),
        (8192, 8192, 8),
    ]
    assert found["chunks"] == ALL.chunks
    assert merged(SPACE, ALL, "forward", widths, {}) == {
        "forward": ALL.forward,
        "chunks": ALL.chunks,
        "forward_slabs": ALL.forward_slabs,
    }


def test_raw_results_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "a.jsonl"
    raw = Raw(path, {"spec": "1"})
    raw.add((128, "forward", (1, 128, 1)), share=0.5, seconds=1e-3)
    raw.add((128, "forward", (2, 128, 1)), skipped="wrong: y")
    with path.open("a") as file:
        file.write('{"spec": "1", "width": 12')  # as a full disk would leave it
    again = Raw(path, {"spec": "1"})
    assert again.shares == {(128, "forward", (1, 128, 1)): 0.5}
    assert (128, "forward", (2, 128, 1)) in again
    again.add((256, "forward", (1, 256, 1)), share=0.25)
    assert len(Raw(path, {"spec": "1"}).shares) == 2
    assert not Raw(path, {"spec": "2"}).shares


def test_progress_estimates_what_is_left() -> None:
    stream = io.StringIO()
    progress = Progress(8, stream)
    progress.step("H 128, forward")
    assert stream.getvalue() == ""  # no terminal, and not ten seconds
    assert progress.line("H 128, forward", 30) == f"[###{'.' * 21}] 1/8, 3:30 left: H 128, forward"
    progress.shown -= 10
    progress.step("H 128, forward")
    assert stream.getvalue().count("\n") == 1


WIDTH = 24
TINY = "name: tuned_tiny\nnorm: rms\neps: {value: 1e-6}\ndtypes: {input: [float32], weight: [same]}\n"


def test_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a search, in the interpreter: the fastest are those that a clock of ours says are."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    Path("specs").mkdir()
    path = Path("specs/tiny.yaml")
    path.write_text(TINY)
    spec = load(path.read_bytes(), str(path))
    # A tenth of the candidates is enough.
    every = Space.launches
    monkeypatch.setattr(Space, "launches", lambda self, ladder, width: every(self, ladder, width)[::10])
    benches: list[Bench] = []
    timed: list[int] = []

    def timer(call: Callable[[], object]) -> float:
        call()
        timed.append(len(timed))
        return 1e-3 / (1 + len(timed))  # each is faster than the one before

    def make(spec: Spec) -> Bench:
        bench = Bench(spec, "float32", 64 * WIDTH, "cpu", timer)
        check = bench.check

        def failing(problem: Any, truth: Any, ladder: str, launch: Any) -> None:
            if ladder == "forward" and launch == refused:
                truth = dataclasses.replace(truth, outputs=tuple(result + 1 for result in truth.outputs))
            check(problem, truth, ladder, launch)

        monkeypatch.setattr(bench, "check", failing)
        benches.append(bench)
        return bench

    options = Options((WIDTH,), "float32", 64 * WIDTH, out=Path("kept"))
    found = search(spec, str(path), options)
    candidates = list(found.todo(WIDTH))
    forward = [launch for ladder, launch in candidates if ladder == "forward"]
    backward = [launch for ladder, launch in candidates if ladder == "backward"]
    refused = forward[-1]
    lines = tune(spec, str(path), options, make)
    assert lines[0] == f"written  {Path('specs/tuned/tiny.yaml')}"
    raw = [json.loads(line) for line in Path("kept/tune/tuned_tiny.jsonl").read_text().splitlines()]
    assert [(line["ladder"], tuple(line["launch"])) for line in raw] == candidates
    [skipped] = [line["skipped"] for line in raw if "skipped" in line]
    assert re.match(r"wrong: 1608 of 1608 elements of y are off, the worst by \d", skipped)
    assert {line["spec"] for line in raw} == {spec.digest}

    again = load(path.read_bytes(), str(path), read_table(path))
    assert isinstance(again, TunedSpec)
    assert again.digest != spec.digest
    for ladder, best in (("forward", forward[-2]), ("backward", backward[-1])):
        name, rung = default(found.space, again.ladders, ladder, WIDTH)
        assert (name, found.space.effective(name, rung, WIDTH)) == (ladder, best)
        assert [width for width, _ in rung.measured] == [WIDTH]
        # Wider rows keep what they had.
        assert default(found.space, again.ladders, ladder, 300)[1] in getattr(found.ladders, ladder)
    assert again.ladders.backward_slabs == spec.ladders.backward_slabs

    count = len(timed)
    table = Path("specs/tuned/tiny.yaml").read_text()
    tune(spec, str(path), options, make)
    assert len(timed) == count  # all is there
    assert Path("specs/tuned/tiny.yaml").read_text() == table

    # A run that is stopped leaves whole lines, and the next goes on there.
    kept = Path("kept/tune/tuned_tiny.jsonl")
    kept.write_text("".join(itertools.islice(kept.open(), 3)))

    def stopping(call: Callable[[], object]) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(spec, str(path), options, lambda spec: Bench(spec, "float32", 64, "cpu", stopping))
    assert len(kept.read_text().splitlines()) == 3
    tune(spec, str(path), options, make)
    assert len(kept.read_text().splitlines()) == len(candidates)
