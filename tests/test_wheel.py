"""The wheel: installed elsewhere it makes the files that the checkout makes."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from normgen import __version__
from normgen.loader import load
from normgen.plan import plan
from normgen.render import render

ROOT = Path(__file__).resolve().parents[1]
SPEC = """\
name: fresh
norm: layer
eps: {value: 3e-6}
affine: {bias: true}
residual: {dtype: float32}
"""


def python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        environ["PYTHONPATH"] = str(path)
    run = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_wheel(tmp_path: Path) -> None:
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"normgen-{__version__}-py3-none-any.whl"
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert not [name for name in packed if "__pycache__" in name]
    assert {name.split("/")[0] for name in packed} == {"normgen", f"normgen-{__version__}.dist-info"}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "templates").rglob("*.jinja")}
    assert templates
    assert {f"normgen/{name}" for name in templates} <= packed

    site, project = tmp_path / "site", tmp_path / "project"
    python("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path)
    project.mkdir()
    (project / "fresh.yaml").write_text(SPEC)
    found = python("-c", "import normgen; print(normgen.__file__)", cwd=project, path=site)
    assert found.strip() == str(site / "normgen" / "__init__.py")

    wanted = render(plan(load(SPEC.encode(), "fresh.yaml")), "fresh.yaml")
    for command in (["-m", "normgen"], [str(site / "bin" / "normgen")]):
        out = f"out{len(command)}"
        said = python(*command, "build", "fresh.yaml", "--out", out, cwd=project, path=site)
        assert said == f"created  {out}/fresh.py\ncreated  {out}/tests/test_fresh.py\n"
        made = {path.relative_to(project / out).as_posix(): path.read_text() for path in (project / out).rglob("*.py")}
        assert made == wanted
