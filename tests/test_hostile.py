"""Builds in a hostile world: killed at any moment, out of space, beside one another, with names made to break out."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from normgen.cli import main
from normgen.emit import Change, check, emit, intact, seal
from normgen.errors import SpecError
from normgen.loader import load
from normgen.target import LADDERS, Table
from normgen.tune.run import table_text

ROOT = Path(__file__).parents[1]
SPEC = "name: a\nnorm: rms\neps: {value: 1e-6}\n"
OLD = {name: seal("old = 1\n", "s.yaml", "0" * 64) for name in ("a.py", "b.py", "tests/test_a.py")}
NEW = {name: seal("new = 1\n" * 9000, "s.yaml", "0" * 64) for name in OLD}


def normgen(*argv: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normgen", *argv]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, **options)  # type: ignore[call-overload]


def emit_and_die(out: Path, moment: int) -> bool:
    """Emits in a process that is killed before its `moment`-th call of the system or of a file; whether it was."""
    child = os.fork()
    if child == 0:
        left = moment

        def step(_: object, event: str, called: object) -> None:
            nonlocal left
            of_file = isinstance(getattr(called, "__self__", None), io.IOBase)
            if event == "c_call" and (of_file or getattr(called, "__module__", "") in ("posix", "io", "_io")):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(step)
        emit(NEW, out, False)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", [{}, OLD], ids=["nothing there", "files there"])
def test_killed_at_any_moment(before: dict[str, str], tmp_path: Path) -> None:
    """Every file is whole, as it was or as it shall be; and the next build makes all of them."""
    moment, killed = 0, True
    while killed:
        moment += 1
        out = tmp_path / str(moment)
        emit(before, out, False)
        killed = emit_and_die(out, moment)
        for name in NEW:
            text = (out / name).read_text() if (out / name).exists() else None
            assert text in (before.get(name), NEW[name])
        changes = emit(NEW, out, False)
        assert check(NEW, out) == []
        assert all(change.status in ("created", "updated", "same") for change in changes)
        assert killed or changes == [Change(out / name, "same") for name in sorted(NEW)]
    assert moment > 4 * len(NEW)  # each is at least looked for, opened, written and renamed


def test_a_disk_that_fills_up_while_a_file_is_written(tmp_path: Path) -> None:
    """The kernel takes 4096 bytes of each file and no more: nothing changes, and nothing is left behind."""
    (tmp_path / "a.yaml").write_text(SPEC)
    limited = (
        "import resource, signal, sys\n"
        "from normgen.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(main(['build', 'a.yaml']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    for known in ([], ["a.py", "test_a.py"]):
        run = subprocess.run(
            [sys.executable, "-c", limited], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert (run.returncode, run.stdout, run.stderr) == (
            2,
            "",
            "generated/a.py: cannot be written: file too large\n",
        )
        assert sorted(path.name for path in tmp_path.rglob("generated/**/*") if path.is_file()) == known
        assert all(intact(path.read_text()) for path in tmp_path.rglob("generated/**/*.py"))
        (tmp_path / "a.yaml").write_text(SPEC.replace("1e-6", "1e-5"))
        assert normgen("build", "a.yaml", cwd=tmp_path).returncode == 0
        (tmp_path / "a.yaml").write_text(SPEC)


def test_builds_at_once_in_several_processes(tmp_path: Path) -> None:
    specs = []
    for name, eps in (("a", "1e-5"), ("a", "1e-6"), ("b", "1e-5")):
        path = tmp_path / eps / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(SPEC.replace("name: a", f"name: {name}").replace("1e-6", eps))
        specs.append(path)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "normgen", "build", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen([*command, str(path)], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        for path in specs
    ]
    assert [run.communicate()[1] for run in runs] == [b""] * 3
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()) == [
        *("a.py", "b.py", "tests/test_a.py", "tests/test_b.py")
    ]
    assert all(intact(path.read_text()) for path in out.rglob("*.py"))


# What would end a comment, a string or a tag of a template, or mean something to a shell, if it were not kept from it.
BREAKERS = [
    '"""\nimport os\n"""',
    "'''+__import__('os').system('id')+'''",
    "{{7*7}}",
    "{% raw %}",
    "{# ",
    "#}",
    "\\",
    "\\N{BULLET}",
    "a\nimport os",
    "a\rimport os",
    "\u2028import os",
    "\u202e",
    "\x1b[31m",
    "%s%n",
    "$(id)",
    "`id`",
    "; rm -rf .",
    "../../a",
    "/etc/passwd",
    "a/b",
    "a.b",
    "a b",
    "A",
    "\uff41",
    "rms ",
]
TEXTS = ["name", "norm", "eps.placement", "dtypes.input", "dtypes.weight", "dtypes.output", "affine", "affine.cast"]
TEXTS += ["hidden", "residual", "residual.add", "residual.dtype", "residual.norm_of", "save", "strategy"]


@pytest.mark.parametrize("path", TEXTS)
def test_no_text_of_a_spec_reaches_a_template_unread(path: str) -> None:
    for breaker in BREAKERS:
        key, _, below = path.partition(".")
        value: object = [breaker] if key in ("save", "hidden") or below in ("input", "weight") else breaker
        spec = {"name": "a", "norm": "rms", "eps": {"value": 1e-6}}
        inside = spec.get(key, {})
        spec |= {key: {**inside, below: value} if below else value}  # type: ignore[dict-item]
        with pytest.raises(SpecError) as caught:
            load(json.dumps(spec).encode(), "s.yaml")
        assert any(fault.key.startswith(path) or not fault.key for fault in caught.value.faults), breaker
        assert all(str(fault).isprintable() for fault in caught.value.faults), breaker


@pytest.mark.parametrize("key", ["gpu", "torch", "triton", "dtype"])
def test_no_text_of_a_table_does_either(key: str) -> None:
    words = {"gpu": "H200", "torch": "2.11.0", "triton": "3.6.0", "dtype": "bfloat16", "elements": 2**27}
    text = table_text(Table.model_validate(words | dict(LADDERS["rms", False])), "a", "s.yaml")
    [line] = [line for line in text.splitlines() if line.startswith(f"{key}: ")]
    load(SPEC.encode(), "s.yaml", (text.encode(), "t.yaml"))
    for breaker in BREAKERS:
        if key != "dtype" and breaker in ("a b", "a.b", "a/b", "A", "rms "):  # what GPUs and versions are called
            continue
        with pytest.raises(SpecError) as caught:
            load(SPEC.encode(), "s.yaml", (text.replace(line, f"{key}: {json.dumps(breaker)}").encode(), "t.yaml"))
        assert all(str(fault).isprintable() for fault in caught.value.faults), breaker


def test_output_goes_to_a_path_that_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(SPEC)
    for command in ("build", "check"):
        for breaker in BREAKERS:
            if breaker.isprintable():
                continue
            assert main([command, "a.yaml", "--out", breaker]) == 2
            out, err = capsys.readouterr()
            assert (out, err.count("\n")) == ("", 1)
            assert err[:-1].isprintable()
    assert os.listdir() == ["a.yaml"]


def test_a_path_that_can_stand_in_a_comment_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bodies = set()
    for index, breaker in enumerate(["plain", *BREAKERS]):
        path = Path(breaker.replace("/", "\u2215") + ".yaml")
        path.write_text(SPEC)
        code = main(["build", str(path), "--out", str(index)])
        err = capsys.readouterr().err
        assert code == (0 if str(path).isprintable() else 2)
        if code:
            assert err.count("\n") == 1
            assert err[:-1].isprintable()
            continue
        for made in ("a.py", "tests/test_a.py"):
            text = Path(str(index), made).read_text()
            assert intact(text)
            bodies.add((made, ast.dump(ast.parse(text)), text.split("\n", 4)[4]))
    assert len(bodies) == 2
