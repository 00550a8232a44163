"""What `normgen tune` searches, without torch: the widths of a spec and what to try at each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from normgen.errors import Fault, SpecError
from normgen.modules import interpreted
from normgen.plan import plan
from normgen.render import solve
from normgen.spec import MAX_HIDDEN, Spec
from normgen.target import Ladders, single_block_limit
from normgen.tune.candidates import DIRECTIONS, Launch, Space, default, space

WIDTHS: tuple[int, ...] = (
    128,
    256,
    512,
    768,
    1024,
    1152,
    1536,
    2048,
    2304,
    2880,
    3072,
    4096,
    4544,
    5120,
    6144,
    6912,
    7168,
    8192,
)
WIDTHS += (12288, 16384, 32768, 65536, 131072, 262144)


@dataclass(frozen=True)
class Options:
    """The arguments of the command."""

    widths: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    elements: int = 2**27
    jobs: int = 1
    seconds: int | None = None
    out: Path = Path(".normgen")


def tune_error(message: str) -> SpecError:
    """Something that keeps the command from going on."""
    return SpecError([Fault("normgen tune", 0, 0, "", message)])


def require_gpu() -> None:
    """Raises SpecError where nothing can be measured."""
    try:
        torch = import_module("torch")
        import_module("triton")
    except ImportError as error:
        raise tune_error(f"measures with torch and triton, and {error.name or error} is not installed here") from None
    if not torch.cuda.is_available():
        raise tune_error("measures on a GPU, and torch finds none here")
    if interpreted():
        raise tune_error("measures compiled kernels, and TRITON_INTERPRET has them interpreted; unset it")


@dataclass(frozen=True)
class Search:
    """What is searched: one spec, and the widths that count."""

    spec: Spec
    """The spec for any width: a width is a constant of its kernels anyhow, and all kernels are there to choose from."""
    space: Space
    widths: tuple[int, ...]
    most: int
    """The widest row that the spec serves, or that is worth a rung of its own."""

    @property
    def ladders(self) -> Ladders:
        return self.spec.ladders

    def todo(self, width: int) -> Iterator[tuple[str, Launch]]:
        """What to try at a width; first what serves it as long as nothing is found."""
        for direction, names in DIRECTIONS.items():
            if not any(name in self.space.ladders for name in names):
                continue
            name, rung = default(self.space, self.ladders, direction, width)
            first = (name, self.space.effective(name, rung, width))
            others = [(n, launch) for n in names if n in self.space.ladders for launch in self.space.launches(n, width)]
            yield from dict.fromkeys((first, *others))


def search(spec: Spec, source: str, options: Options) -> Search:
    """Raises SpecError for a dtype or a width that the spec does not take."""
    if options.dtype not in spec.dtypes.input:
        message = f"the spec takes no x of {options.dtype}; write --dtype {spec.dtypes.input[0]}"
        raise SpecError([Fault(source, 0, 0, "", message)])
    most = single_block_limit(spec.ladders, spec.grad) if spec.strategy == "single_block" else MAX_HIDDEN
    served = spec.widths or tuple(width for width in WIDTHS if width <= most)
    widths = tuple(sorted(set(options.widths))) or served
    for width in widths:
        if width > most or (spec.widths and width not in spec.widths):
            wanted = f"one of {', '.join(map(str, spec.widths))}" if spec.widths else f"at most {most}"
            raise SpecError([Fault(source, 0, 0, "", f"the spec takes no rows of {width}; --width must be {wanted}")])
    dynamic = spec.model_copy(update={"hidden": "dynamic"})
    return Search(dynamic, space(solve(plan(dynamic)), options.dtype), widths, most)


def forecast(found: Search) -> list[str]:
    """How much there is to try, by width and ladder."""
    lines = []
    total: Counter[str] = Counter()
    for width in found.widths:
        count = Counter(ladder for ladder, _ in found.todo(width))
        total += count
        lines.append(f"H {width:<7} {', '.join(f'{number} {name}' for name, number in count.items())}")
    return [*lines, f"{found.spec.name}: {total.total()} candidates at {len(found.widths)} widths"]
