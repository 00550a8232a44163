"""`normgen verify` on other people's norms and on ours, and the table of what it finds, PEERS.md.

python -m tests.peers_table benchmarks/results/h200/peers.json --jobs 8

Results are kept after each implementation. A second run with the same file replaces those that it runs again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normgen import __version__
from normgen.verify.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "PEERS.md"
PITFALLS = ROOT / "tests" / "PITFALLS.md"
LINE = "\n"


@dataclass(frozen=True)
class Pair:
    """An implementation and the spec that it is held to."""

    spec: str
    peer: str
    implementation: str
    forward_only: bool = False
    remark: str = ""
    """What it is made for, where that is not what the spec says."""

    @property
    def name(self) -> str:
        return f"{self.spec}/{self.peer}"

    @property
    def library(self) -> str:
        """Whose it is; behind a comma stands what the wrapper does about it."""
        return self.peer.split(",")[0]


# What takes longest comes first.
PAIRS = (
    Pair("rmsnorm", "normgen", "generated/rmsnorm.py:rmsnorm"),
    Pair("layernorm", "normgen", "generated/layernorm.py:layernorm"),
    Pair("rmsnorm_residual", "normgen", "generated/rmsnorm_residual.py:rmsnorm_residual"),
    Pair("rmsnorm", "torch.compile", "tests/peers.py:compiled_rms"),
    Pair("layernorm", "torch.compile", "tests/peers.py:compiled_layer"),
    Pair("rmsnorm_residual", "torch.compile", "tests/peers.py:compiled_add_rms"),
    Pair("rmsnorm", "quack", "tests/peers.py:quack_rms"),
    Pair(
        "layernorm",
        "quack",
        "tests/peers.py:quack_layer",
        forward_only=True,
        remark="takes two dimensions, contiguous and aligned; all else is an error, which counts as a fault",
    ),
    Pair(
        "rmsnorm_residual",
        "quack",
        "tests/peers.py:quack_add_rms",
        remark="normalises the sum as it is before it is rounded, this spec the sum as it is stored",
    ),
    Pair("rmsnorm", "liger", "tests/peers.py:liger_rms"),
    Pair(
        "rmsnorm",
        "liger, dy copied",
        "tests/peers.py:liger_rms_with_a_copy",
        remark="writes over a copy of the incoming gradient, so that what else there is can be seen",
    ),
    Pair("layernorm", "liger", "tests/peers.py:liger_layer"),
    Pair("rmsnorm_residual", "liger", "tests/peers.py:liger_add_rms"),
    Pair("rmsnorm", "torch", "tests/peers.py:torch_rms"),
    Pair("layernorm", "torch", "tests/peers.py:torch_layer"),
    Pair("rmsnorm", "eager formula", "tests/peers.py:eager_rms"),
    Pair("layernorm", "eager formula", "tests/peers.py:eager_layer"),
    Pair("rmsnorm_residual", "eager formula", "tests/peers.py:eager_add_rms"),
)
PACKAGES = {"torch": "torch", "triton": "triton", "liger": "liger-kernel", "quack": "quack-kernels"}

LIBRARIES = {
    "torch": "pytorch/pytorch",
    "torch.compile": "pytorch/pytorch",
    "liger": "linkedin/Liger-Kernel",
    "quack": "Dao-AILab/quack",
    "eager formula": "",  # anybody's
}
# Public reports, by implementation and row of PITFALLS.md: the kinds of fault that each is about.
REPORTS = {
    ("layernorm/torch", 1): ("rows of zeros",),
    ("layernorm/torch", 2): ("wrong values",),
    ("layernorm/eager formula", 4): ("large mean cancels", "gradients of rows far from zero"),
    ("layernorm/eager formula", 5): ("constant rows",),
    ("layernorm/torch", 17): ("constant rows", "wrong gradients", "rows of 1 to 3 elements"),
    ("rmsnorm/torch", 19): ("eps narrowed to fp16",),
    ("rmsnorm/quack", 52): ("layout of the incoming gradient",),
    ("rmsnorm_residual/quack", 52): ("layout of the incoming gradient",),
    ("rmsnorm/liger", 77): ("inputs changed",),
    ("rmsnorm_residual/quack", 82): ("wrong gradients", "one result used alone"),
    ("rmsnorm/liger", 107): ("another GPU is current",),
    ("rmsnorm/liger, dy copied", 107): ("another GPU is current",),
    ("layernorm/liger", 107): ("another GPU is current",),
    ("rmsnorm_residual/liger", 107): ("another GPU is current",),
}


def links(pair: Pair, number: int) -> str:
    """To the reports in that row that are about its library. Raises LookupError where there is none."""
    rows = re.findall(rf"^\| {number} \|([^|]*)\|", PITFALLS.read_text(), re.MULTILINE)
    found = re.findall(rf"https://github\.com/{LIBRARIES[pair.library]}[\w./-]+/\d+", "".join(rows))
    if not found:
        raise LookupError(f"row {number} of PITFALLS.md has no report about {pair.library}, as REPORTS says")
    names = [re.sub("/(issues|pull)/", "#", link.removeprefix("https://github.com/")) for link in found]
    return ", ".join(f"[{name}]({link})" for name, link in zip(names, found, strict=True))


def reported(kind: str, pair: Pair) -> str:
    """Public reports of that kind of fault in that implementation."""
    rows = [number for (name, number), kinds in REPORTS.items() if name == pair.name and kind in kinds]
    return f"; reported: {', '.join(links(pair, number) for number in rows)}" if rows else ""


def not_seen(pair: Pair, result: dict[str, Any]) -> list[str]:
    """A line for each report of which no kind is a fault here, though some were looked for."""
    lines = []
    for (name, number), kinds in REPORTS.items():
        verdicts = {kind: result.get("kinds", {}).get(kind, {}).get("verdict") for kind in kinds}
        looked_for = [kind for kind, verdict in verdicts.items() if verdict == "ok"]
        if name == pair.name and looked_for and "fault" not in verdicts.values():
            lines.append(f"- {pair.peer}, {', '.join(looked_for)}: not seen in these versions: {links(pair, number)}")
    return lines


def versions() -> dict[str, str | None]:
    """The device, and the version of each package, None where it is not installed."""
    import torch

    from normgen.bench.header import version

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, interpreter"
    return {"device": device, "normgen": __version__, **{name: version(name) for name in PACKAGES.values()}}


def verify(pair: Pair, seconds: int, found: dict[str, str | None]) -> dict[str, Any]:
    """What `normgen verify` says of it: exit code, kinds of fault, what it refuses; or why there is nothing."""
    about: dict[str, Any] = {"implementation": pair.implementation, "forward_only": pair.forward_only}
    package = PACKAGES.get(pair.library, "torch")
    if found[package] is None:
        return about | {"exit": None, "why": f"{package} is not installed"}
    command = [sys.executable, "-m", "normgen", "verify", f"specs/{pair.spec}.yaml", "--impl", pair.implementation]
    command += ["--format", "json", "--seconds", str(seconds), *["--forward-only"] * pair.forward_only]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    about |= {"exit": done.returncode, "seconds": round(time.monotonic() - start)}
    if not done.stdout:
        return about | {"why": (done.stderr.splitlines() or ["it said nothing"])[-1]}
    said = json.loads(done.stdout.replace(f"{ROOT}/", ""))
    if "kinds" not in said:
        return about | {"why": said["faults"][0]["message"]}
    kinds = {one.pop("kind"): {key: value for key, value in one.items() if value} for one in said["kinds"]}
    about |= {"kinds": kinds, "refused": said["refused"]}
    return about | {"why": said["stopped"]} if said["stopped"] else about


def run(pairs: Sequence[Pair], out: Path, jobs: int, seconds: int) -> None:
    """Runs them, several at a time, and writes `out` anew after each. What it holds of others stays.

    Raises SystemExit where `out` was made with other versions or on another device.
    """
    found = versions()
    document = json.loads(out.read_text()) if out.exists() else {"versions": found, "pairs": {}}
    if document["versions"] != found:
        sys.exit(f"{out}: made with {document['versions']}, and here are {found}; remove it or name another file")
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(verify, pair, seconds, found): pair.name for pair in pairs}
        for count, future in enumerate(as_completed(futures), 1):
            name, result = futures[future], future.result()
            document["pairs"] = dict(sorted({**document["pairs"], name: result}.items()))
            part = out.with_name(f"{out.name}.part")
            part.write_text(json.dumps(document, indent=1) + LINE)
            part.replace(out)  # whole, whenever this is killed
            said = result.get("why") or ", ".join(faults(result)) or "no fault"
            print(f"{count}/{len(pairs)} {name}: {said}", flush=True)


def faults(result: dict[str, Any]) -> list[str]:
    return [kind for kind, one in result.get("kinds", {}).items() if one["verdict"] == "fault"]


def plain(text: str) -> str:
    """In one line, not too long, and nothing of it Markdown."""
    line = " ".join(text.split())
    return re.sub(r"([\\`*_<>|\[\]])", r"\\\1", line if len(line) <= 240 else f"{line[:180]} ... {line[-55:]}")


def matrix(results: dict[str, dict[str, Any]]) -> list[str]:
    """Kinds by peers; those that are ok wherever they are looked for in a sentence below."""
    heads = [f"{peer}, forward" if one["forward_only"] else peer for peer, one in results.items()]
    lines, fine, reasons = [f"| {' | '.join(['kind of fault', *heads])} |", f"|{'---|' * (len(heads) + 1)}"], [], {}
    for kind in (one.name for one in KINDS):
        found = [result["kinds"].get(kind, {"verdict": ""}) for result in results.values()]
        cells = [one["verdict"] for one in found]
        if set(cells) - {"", "ok"}:
            lines.append(f"| {' | '.join([kind, *cells]).replace('| fault', '| **fault**')} |")
        elif any(cells):
            fine.append(kind)
        for one in found:
            if one["verdict"] == "not run":
                reasons.setdefault(one["case"], {})[kind] = None
    lines += ["", textwrap.fill(f"Ok in all: {'; '.join(fine) or 'none'}.", 120, break_on_hyphens=False), ""]
    return [*lines, *(f"- Not run: {'; '.join(kinds)}. Reason: {plain(why)}" for why, kinds in reasons.items())]


def refusals(refused: Sequence[str]) -> list[str]:
    """What is refused, `dtypes: message (width H)`: in one line where messages differ in dtypes and widths alone."""
    alike: dict[str, tuple[str, dict[str, None], dict[str, None]]] = {}
    for one in refused:
        dtypes, message = one.split(": ", 1)
        message, width = message.removesuffix(")").rsplit(" (width ", 1)
        _, all_dtypes, widths = alike.setdefault(re.sub(rf"\b{width}\b", "", message), (message, {}, {}))
        all_dtypes[dtypes], widths[width] = None, None
    return [f"{', '.join(dtypes)}: {said} (width {', '.join(widths)})" for said, dtypes, widths in alike.values()]


def section(spec: str, results: dict[str, Any]) -> str:
    """The matrix of a spec, each fault, what is refused, and what was not run."""
    mine = [(pair, results.get(pair.name, {"why": "it was not tried"})) for pair in PAIRS if pair.spec == spec]
    done = {pair.peer: result for pair, result in mine if "kinds" in result}
    lines = [f"## specs/{spec}.yaml", "", *(matrix(done) if done else [])]
    for pair, result in mine:
        for kind in faults(result):
            one = result["kinds"][kind]
            said = f"{plain(one['case'])}: {plain(one.get('message', ''))} ({one['failed']} of {one['ran']} tests)"
            lines.append(f"- {pair.peer}, **{kind}**. {said}{reported(kind, pair)}")
        lines += not_seen(pair, result)
        lines += [f"- {pair.peer} {pair.remark}"] if pair.remark and "kinds" in result else []
        lines += [f"- {pair.peer} refuses {plain(one)}" for one in refusals(result.get("refused", []))]
        if "why" in result:
            lines.append(f"- {pair.peer} was not run{' in full' * ('kinds' in result)}: {plain(result['why'])}")
    return LINE.join([*lines, ""])


def render(document: dict[str, Any]) -> str:
    """The table, of what `run` wrote."""
    ours = [document["pairs"].get(pair.name, {}) for pair in PAIRS if pair.peer == "normgen"]
    tried = [result for result in ours if "kinds" in result and "why" not in result]
    wrong = list(filter(faults, ours))
    device, *packages = document["versions"].items()
    listed = ", ".join(f"{package} {version or 'not installed'}" for package, version in packages)
    return f"""\
# What `normgen verify` finds in other norms, and in ours

{device[1]}; {listed}.
Functions that normgen made: {len(tried)} of {len(ours)} were run in full, {len(wrong)} have a fault.

    python -m tests.peers_table benchmarks/results/h200/peers.json --jobs 8

makes it, with the wrappers in [peers.py](peers.py); `eager formula` is the formula in fp32 as it is often written. The
[README](../README.md) says what the verdicts mean. An empty cell: a run without gradients has no such test. A fault
comes with its smallest case, the size of its error there, and how many tests show it; and with a link where one of the
[reports](PITFALLS.md) is of this kind and this library, which need not mean the same cause. A report is not seen where
its kinds were looked for and are ok.

{LINE.join(section(spec, document["pairs"]) for spec in dict.fromkeys(pair.spec for pair in PAIRS))}"""


def main() -> int:
    names = [pair.name for pair in PAIRS]
    parser = argparse.ArgumentParser(prog="python -m tests.peers_table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json", help="where results are kept")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SPEC/PEER", help=", ".join(names))
    parser.add_argument("--jobs", type=int, default=4, help="implementations at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=int, default=600, help="for each of them (default: %(default)s)")
    parser.add_argument("--render", action="store_true", help="run nothing: write the table of what OUT.json holds")
    given = parser.parse_args()
    if not given.render:
        run([pair for pair in PAIRS if pair.name in given.only], given.out, given.jobs, given.seconds)
    document = json.loads(given.out.read_text())
    TABLE.write_text(render(document))
    return int(any(faults(document["pairs"].get(pair.name, {})) for pair in PAIRS if pair.peer == "normgen"))


if __name__ == "__main__":
    sys.exit(main())
