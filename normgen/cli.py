"""The command line: arguments, printing, exit codes (`EXIT_CODES`)."""

from __future__ import annotations

import argparse
import io
import json
import os
import reprlib
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from normgen import __version__
from normgen.bench import cases
from normgen.emit import EditedError, check, create, emit, spec_path, strays
from normgen.errors import Fault, OutputError, SpecError, ToolError
from normgen.loader import fault_at, load, read, read_table, table_path
from normgen.spec import MAX_HIDDEN, InputDtype, Spec, json_schema
from normgen.target import TARGETS

if TYPE_CHECKING:
    from normgen.plan import Plan

OUT = "generated"

EXIT_CODES = """\
exit codes:
  0  all is well
  1  findings: drift, files edited by hand, kernels that spill or access rows
     piecemeal, an implementation that is wrong
  2  errors: specs, usage, the output folder, something that is needed and
     missing, an implementation that cannot be run
"""

# What `new` writes. It shows every key; all but name, norm and eps are at their defaults.
STARTER = """\
# A spec for normgen. `normgen build {path}` compiles it; `normgen explain {path}` says what it will do.
# `normgen schema` prints the JSON Schema of this file, for completion in an editor.

name: {name}  # the file, the function and the operator are called this

norm: rms  # rms: x / rms(x); layer: (x - mean) / std

# The widths of the normalised axis: dynamic (any), one width such as 4096, or a list such as [1024, 4096].
hidden: dynamic

eps:
  value: 1e-6  # also the default of the run-time argument eps
  placement: inside_sqrt  # inside_sqrt: 1/sqrt(var + eps), as in PyTorch; outside_sqrt: 1/(sqrt(var) + eps)

# What a call may use: float16, bfloat16, float32; `same` is the dtype of x. float64 is always accepted besides.
dtypes:
  input: [float16, bfloat16, float32]
  weight: [same, float32]
  output: same

affine:  # or `affine: none`
  weight: true
  bias: false
  weight_offset: 0.0  # 1.0 multiplies by 1 + weight
  cast: multiply_then_cast  # cast_then_multiply rounds x_hat to the dtype of x before the product, as in Llama

# A second input that is added to x before the norm. Its keys and their defaults:
#   residual:
#     add: before_norm
#     store_sum: true  # return x + residual as a second result
#     dtype: same  # of the residual and of the stored sum: same or float32
#     norm_of: rounded_sum  # or unrounded_sum: normalise the fp32 sum
residual: none

save: []  # row statistics kept for backward, of mean and rstd; what is not saved is computed again

grad: true  # false leaves the backward pass and autograd out

strategy: auto  # auto: by width; single_block: a row in one block; welford: a loop over chunks of the row
"""


@dataclass
class Report:
    """What a command has to say: lines for people, data for programs, and faults for both."""

    lines: list[str] = field(default_factory=list)
    data: dict[str, object] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    code: int = 0


def _load(sources: Sequence[str], tables: bool = True) -> dict[str, Spec]:
    """All specs of a run, by the path they were named by, with their tables unless `tables` is false.

    Raises SpecError with the faults of all of them.
    """
    if not sources:
        raise SpecError(
            [Fault("specs", 0, 0, "", "no *.yaml file here; name the specs, or write one with normgen new")]
        )
    specs: dict[str, Spec] = {}
    owners: dict[str, str] = {}
    faults: list[Fault] = []
    for source in dict.fromkeys(sources):
        try:
            spec_path(Path(source))
            beside = Path(source).parent.parent / Path(source).name
            if table_path(beside) == Path(source) and beside.is_file():
                raise SpecError([Fault(source, 0, 0, "", f"the table of a spec, and no spec; name {beside} instead")])
            data = read(Path(source))
            spec = load(data, source, read_table(Path(source)) if tables else None)
        except SpecError as error:
            faults += error.faults
            continue
        # Names are lower case, so two that differ on one file system differ on all.
        owner = owners.setdefault(spec.name, source)
        if owner != source:
            faults.append(
                fault_at(data, source, "name", f"{owner} has this name as well; their files would be the same")
            )
        specs[source] = spec
    if faults:
        raise SpecError(faults)
    return specs


def _plan(spec: Spec) -> Plan:
    from normgen.plan import plan

    return plan(spec)


def _render(specs: dict[str, Spec]) -> dict[str, dict[str, str]]:
    """The generated files of each spec, by its path."""
    from normgen.render import render

    return {source: render(_plan(spec), spec_path(Path(source))) for source, spec in specs.items()}


def _default_specs() -> list[str]:
    return [path.as_posix() for path in sorted(Path("specs").glob("*")) if path.suffix in (".yaml", ".yml")]


def _build(args: argparse.Namespace) -> Report:
    files = {name: text for made in _render(_load(args.specs)).values() for name, text in made.items()}
    changes = emit(files, Path(args.out), args.force)
    return Report(
        lines=[f"{change.status:<7}  {change.path}" for change in changes],
        data={"changes": [{"path": str(change.path), "status": change.status} for change in changes]},
    )


def _check(args: argparse.Namespace) -> Report:
    out = Path(args.out)
    rendered = _render(_load(args.specs or _default_specs()))
    report = Report()
    drifts: list[dict[str, object]] = []
    for source, files in rendered.items():
        for drift in check(files, out):
            fix = f"normgen build {shlex.quote(source)}"
            fix += f" --out {shlex.quote(args.out)}" if args.out != OUT else ""
            fix += " --force" if drift.edited else ""
            what = {"missing": "missing", "differs": f"not what {source} makes"}[drift.status]
            what += ", and edited by hand" if drift.edited else ""
            report.faults.append(Fault(str(drift.path), 0, 0, "", f"{what}; run: {fix}"))
            report.lines += [drift.diff] if drift.diff else []
            drifts.append({"path": str(drift.path), "status": drift.status, "edited": drift.edited, "fix": fix})
    if not args.specs:
        known = {name: text for files in rendered.values() for name, text in files.items()}
        for path in strays(known, {spec_path(Path(source)) for source in rendered}, out):
            fix = f"rm {shlex.quote(str(path))}"
            report.faults.append(Fault(str(path), 0, 0, "", f"no spec makes this file any more; run: {fix}"))
            drifts.append({"path": str(path), "status": "stray", "edited": False, "fix": fix})
        for path in sorted(Path("specs/tuned").glob("*.yaml")):
            if not any(table_path(Path(source)) == path for source in rendered):
                fix = f"rm {shlex.quote(str(path))}"
                report.faults.append(Fault(str(path), 0, 0, "", f"a table without its spec; run: {fix}"))
                drifts.append({"path": str(path), "status": "stray", "edited": False, "fix": fix})
    report.data = {"drift": drifts}
    report.code = 1 if report.faults else 0
    if not report.faults:
        report.lines.append(f"{sum(map(len, rendered.values()))} files are what their specs make")
    return report


def _explain(args: argparse.Namespace) -> Report:
    from normgen.render import explain, explain_data

    [spec] = _load([args.spec]).values()
    plan = _plan(spec)
    return Report(lines=[explain(plan).rstrip("\n")], data=explain_data(plan))


def _inspect(args: argparse.Namespace) -> Report:
    from normgen.inspect import data, faults, inspect, table

    specs = _load(args.specs)
    found = inspect(specs, args.target, args.dtype, args.weight_dtype, widths=args.width, jobs=args.jobs)
    report = Report(lines=table(found), data={"kernels": data(found)}, faults=faults(found))
    report.code = 1 if report.faults else 0
    return report


def _verify(args: argparse.Namespace) -> Report:
    from normgen.verify.run import findings, table, verify

    [spec] = _load([args.spec]).values()
    found = verify(_plan(spec), args.impl, args.forward_only, args.seconds)
    # The table says it all; a fault a line is for those who do not read it.
    faults = [] if args.format == "text" and found.wrong else findings(found, args.impl)
    code = 1 if found.wrong else 2 if found.stopped else 0
    return Report(lines=table(found), data=asdict(found), faults=faults, code=code)


def _schema(args: argparse.Namespace) -> Report:
    return Report(lines=[json.dumps(json_schema(), indent=2)])


def _list(args: argparse.Namespace) -> Report:
    specs = _load(args.specs or _default_specs())
    rows = [
        {"path": source, "name": spec.name, "norm": spec.norm, "summary": _summary(spec)}
        for source, spec in specs.items()
    ]
    width = max(len(row["name"]) for row in rows)
    return Report(lines=[f"{r['name']:<{width}}  {r['norm']:<5}  {r['summary']}" for r in rows], data={"specs": rows})


def _summary(spec: Spec) -> str:
    """One line on what sets a spec apart: width, eps, stages, gradient; dtypes and strategy where not the defaults."""
    parts = [f"H {spec.hidden if spec.widths is None else ' or '.join(map(str, spec.widths))}"]
    parts.append(f"eps {spec.eps.value!r} {spec.eps.placement}")
    if spec.residual:
        fp32, unrounded = spec.residual.dtype == "float32", spec.residual.norm_of == "unrounded_sum"
        stored = ", sum stored" + ", unrounded_sum" * unrounded if spec.residual.store_sum else ""
        parts.append("residual" + " in float32" * fp32 + stored)
    if spec.affine:
        late = spec.affine.cast == "cast_then_multiply"
        parts.append(spec.affine.gain + ", bias" * spec.affine.bias + ", cast_then_multiply" * late)
    for name, value in spec.dtypes.model_dump(exclude_defaults=True).items():
        parts.append(f"{name} {value if isinstance(value, str) else ' or '.join(value)}")
    parts += [spec.strategy] if spec.strategy != "auto" else []
    parts.append("forward and backward" if spec.grad else "forward only")
    return "; ".join(parts)


def _tune(args: argparse.Namespace) -> Report:
    from normgen.tune.search import Options, forecast, require_gpu, search

    specs = _load(args.specs, tables=False)
    options = Options(
        widths=tuple(args.width or ()),
        dtype=args.dtype,
        elements=args.elements,
        jobs=args.jobs,
        seconds=args.seconds,
        out=Path(args.out),
    )
    if args.dry_run:
        found = {source: forecast(search(spec, source, options)) for source, spec in specs.items()}
    else:
        require_gpu()
        from normgen.tune.run import tune

        found = {source: tune(spec, source, options) for source, spec in specs.items()}
    return Report(lines=[line for lines in found.values() for line in lines], data={"tuned": found})


def _new(args: argparse.Namespace) -> Report:
    path = Path("specs", f"{args.name}.yaml")
    change = create(path, STARTER.format(name=args.name, path=path.as_posix()))
    return Report(
        lines=[f"{change.status:<7}  {path}"],
        data={"changes": [{"path": str(path), "status": change.status}]},
    )


def _name(text: str) -> str:
    """A name that a spec may have; it is tried out in the starter, where nothing else can be wrong."""
    try:
        return load(STARTER.format(name=json.dumps(text), path="").encode(), "").name
    except SpecError as error:
        raise argparse.ArgumentTypeError(error.faults[0].message) from None


def _implementation(text: str) -> str:
    place, colon, function = text.rpartition(":")
    if not (place and colon and all(part.isidentifier() for part in function.split("."))):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no function; write package.module:function or file.py:function"
        )
    return text


def _target(text: str) -> str:
    if text not in TARGETS:
        *most, last = TARGETS
        raise argparse.ArgumentTypeError(f"{text!r} is no target; write {', '.join(most)} or {last}")
    return text


def _whole(text: str, most: int = 2**40) -> int:
    """An argument that is a whole number, from 1 to `most`."""
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is no whole number from 1 to {most}")
    return int(text)


def _jobs(text: str) -> int:
    return _whole(text, 1024)


def _seconds(text: str) -> int:
    return _whole(text, 10**6)


def _width(text: str) -> int:
    return _whole(text, MAX_HIDDEN)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="normgen",
        description="Compile YAML specs to specialised Triton normalisation kernels.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"normgen {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], Report], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        made.set_defaults(run=run, format="text")
        return made

    build = command("build", _build, "write the modules and tests of specs")
    build.add_argument("--force", action="store_true", help="overwrite files that were edited by hand")
    check = command("check", _check, "compare the files on disk with what their specs make; exit 1 where they differ")
    explain = command("explain", _explain, "say what a spec compiles to, and why")
    inspect = command(
        "inspect", _inspect, "compile kernels, without a GPU, and say what they take of one; exit 1 for spills"
    )
    inspect.add_argument("--target", required=True, type=_target, help=f"one of {', '.join(TARGETS)}")
    dtypes = get_args(InputDtype)
    inspect.add_argument("--dtype", choices=dtypes, help="of x (default: bfloat16, or what the spec lists first)")
    inspect.add_argument("--weight-dtype", choices=dtypes, help="of weight and bias (default: that of x if listed)")
    inspect.add_argument("--width", nargs="+", type=_width, metavar="H", help="default: the widest of each rung")
    inspect.add_argument("--jobs", type=_jobs, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    verify = command(
        "verify", _verify, "run the tests of a spec on any implementation of it; exit 1 where values are wrong"
    )
    verify.add_argument(
        "--impl",
        required=True,
        type=_implementation,
        metavar="MODULE:FUNCTION",
        help="package.module:function or file.py:function; it is called with the spec's arguments by name",
    )
    verify.add_argument("--forward-only", action="store_true", help="ask for no gradients")
    verify.add_argument(
        "--seconds", type=_seconds, default=1800, metavar="S", help="stop after that long (default: %(default)s)"
    )
    command("schema", _schema, "print the JSON Schema of a spec file, for editors")
    listing = command("list", _list, "list specs, one line each")
    new = command("new", _new, "write a commented spec to start from, specs/NAME.yaml")
    new.add_argument("name", metavar="NAME", type=_name, help="of the norm: a Python identifier in lower case")
    bench = command("bench", _bench, "measure specs against a copy, torch and other libraries, on a CUDA GPU")
    text = "default: those that people use, 64 to 262144"
    bench.add_argument("--width", nargs="+", type=_width, default=(), metavar="H", help=text)
    text = "default: as many as --elements holds"
    bench.add_argument("--rows", nargs="+", type=_whole, default=(), metavar="N", help=text)
    text = f"of x (default: {cases.ELEMENTS})"
    bench.add_argument("--elements", type=_whole, metavar="N", help=text)
    text = f"of x (default: {cases.DTYPES[0]}; with --errors all that a spec takes)"
    bench.add_argument("--dtype", choices=cases.DTYPES, help=text)
    bench.add_argument("--mode", nargs="+", choices=cases.MODES, default=(), help="default: all")
    bench.add_argument(
        "--providers",
        nargs="+",
        choices=cases.PROVIDERS,
        default=(),
        help="default: all that are installed; copy is always measured",
    )
    instead = bench.add_mutually_exclusive_group()
    instead.add_argument("--latency", action="store_true", help="small work instead: GPU and host time of a call")
    instead.add_argument("--errors", action="store_true", help="errors in units in the last place instead of times")
    bench.add_argument(
        "--profile", action="store_true", help="count DRAM bytes too, with ncu; at H = 4096 unless --width"
    )
    bench.add_argument("--jobs", type=_jobs, default=1, metavar="N", help="compile ahead in N processes")
    bench.add_argument("--out", metavar="DIR", help="write JSON, CSV and plots there")
    tune = command("tune", _tune, "search the launch parameters of specs on the GPU at hand; write tuned/NAME.yaml")
    tune.add_argument(
        "--width", nargs="+", type=_width, metavar="H", help="default: those of the spec, or 128 to 262144"
    )
    tune.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="bfloat16", help="of x (default: %(default)s)"
    )
    tune.add_argument("--elements", type=_whole, default=2**27, metavar="N", help="of x, when timed (default: 2^27)")
    tune.add_argument(
        "--jobs",
        type=_jobs,
        default=min(8, os.cpu_count() or 1),
        metavar="N",
        help="that compile (default: %(default)s)",
    )
    tune.add_argument(
        "--seconds", type=_seconds, metavar="S", help="stop searching after that; what was not tried keeps its rung"
    )
    tune.add_argument("--dry-run", action="store_true", help="say how much there is to try; needs no GPU")
    tune.add_argument(
        "--out", default=".normgen", metavar="DIR", help="folder of raw measurements (default: %(default)s)"
    )
    path = "path of a spec, such as specs/NAME.yaml"
    for made in (explain, verify):
        made.add_argument("spec", metavar="SPEC", help=path)
    for made in (build, inspect, bench, tune):
        made.add_argument("specs", nargs="+", metavar="SPEC", help=path)
    for made in (check, listing):
        made.add_argument("specs", nargs="*", metavar="SPEC", help=f"{path} (default: specs/*.yaml)")
    for made in (build, check):
        made.add_argument("--out", default=OUT, metavar="DIR", help="output folder (default: %(default)s)")
    for made in (build, check, explain, verify, inspect, listing, new, bench, tune):
        made.add_argument("--format", choices=("text", "json", "github"), default="text", help="default: %(default)s")
    return parser


def _bench(args: argparse.Namespace) -> Report:
    specs = _load(args.specs)
    try:
        from normgen.bench import accuracy, run
    except ModuleNotFoundError as error:
        raise OutputError(
            "normgen bench", f"{error.name} is not installed; pip install 'normgen[runtime]' brings it"
        ) from None
    given = {"--mode": args.mode, "--elements": args.elements, "--profile": args.profile, "--rows": args.rows[1:]}
    unused = {"--errors": given, "--latency": {"--mode": args.mode}}
    for option, others in unused.items():
        for other, value in others.items():
            if getattr(args, option[2:]) and value:
                what = "takes one number with" if other == "--rows" else "has no part in"
                raise ToolError("normgen bench", f"{other} {what} {option}; leave one out")
    out = Path(args.out) if args.out else None
    widths, rows, providers = tuple(args.width), tuple(args.rows), tuple(args.providers)
    if args.errors:
        dtypes = (args.dtype,) if args.dtype else ()
        count = rows[0] if rows else cases.ERROR_ROWS
        results, lines = accuracy.accuracy(specs, accuracy.Options(widths, count, dtypes, providers, args.jobs, out))
    else:
        options = run.Options(
            widths=widths,
            elements=args.elements or cases.ELEMENTS,
            rows=rows,
            dtype=args.dtype or cases.DTYPES[0],
            providers=providers,
            modes=tuple(args.mode or cases.MODES),
            latency=args.latency,
            profile=args.profile,
            jobs=args.jobs,
            out=out,
        )
        results, lines = run.bench(specs, options)
    return Report(lines=lines, data=results.document(), code=1 if results.failed else 0)


def _report(args: argparse.Namespace) -> Report:
    try:
        report: Report = args.run(args)
        return report
    except EditedError as error:
        return Report(faults=error.faults, code=1)
    except (SpecError, OutputError, ToolError) as error:
        return Report(faults=error.faults, code=2)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        return Report(faults=[Fault(ascii(str(error.filename or "normgen"))[1:-1], 0, 0, "", said)], code=2)


def _print(report: Report, style: str) -> None:
    if style == "json":
        print(json.dumps({**report.data, "faults": [asdict(fault) for fault in report.faults]}, indent=2))
        return
    for line in report.lines:
        print(line)
    for fault in report.faults:
        if style == "github":
            print(_annotation(fault))
        else:
            print(fault, file=sys.stderr)


def _annotation(fault: Fault) -> str:
    """A fault as a workflow command of GitHub Actions, which shows it beside the line of the file."""

    def escape(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    place = "file=" + escape(fault.path).replace(":", "%3A").replace(",", "%2C")
    place += f",line={fault.line},col={fault.column}" if fault.line else ""
    return f"::error {place}::" + escape(f"{fault.key}: {fault.message}" if fault.key else fault.message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may hold what the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            args = _parser().parse_args(argv)
            report = _report(args)
            _print(report, args.format)
            return report.code
        finally:
            if sys.stdout is not None:  # it is None where the shell has closed it
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        # Nobody reads on, as in `normgen list | head -1`, or the disk is full: what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"normgen: the output cannot be written: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()  # a fault of normgen's own: no finding, as exit code 1 would say
        return 2
