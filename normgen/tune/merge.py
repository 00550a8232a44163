"""Measurements -> ladders: the fewest rungs with which no width loses more than 1 % against its own best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from normgen.target import WIDEST, Chunk, Ladders, Rung, Slab, Tile, power_above
from normgen.tune.candidates import DIRECTIONS, POWERS, Launch, Space, default

LOSS = 0.01

Shares = Mapping[tuple[int, str, Launch], float]
"""The share of a device copy, by width, ladder and launch."""
Values = tuple[int, ...]
"""The numbers of a rung without its width, in the order of its fields."""
Cost = tuple[float, int, float]
"""What counts, in this order: loss beyond the limit, rungs, loss."""
NOTHING: Cost = (0.0, 0, 0.0)

_MODELS: dict[str, tuple[type[Tile] | type[Chunk] | type[Slab], tuple[str, ...]]] = {
    "forward": (Tile, ("columns", "elements", "warps", "stages", "programs")),
    "backward": (Tile, ("columns", "elements", "warps", "stages", "programs")),
    "chunks": (Chunk, ("columns", "warps", "programs")),
    "forward_slabs": (Slab, ("columns", "warps", "programs", "stages")),
    "backward_slabs": (Slab, ("columns", "warps", "programs", "stages")),
}


@dataclass(frozen=True)
class _Step:
    """One rung of a ladder: it serves the widths from `start` to before `end`, by their indices."""

    cost: Cost
    ladder: str
    values: Values
    start: int
    end: int


def grid(space: Space, ladders: Ladders, tried: Sequence[int], most: int) -> list[int]:
    """The widths that rungs may end at: those tried, and those where the default rungs end, up to `most`."""
    ends = {rung.widest for name in space.ladders for rung in getattr(ladders, name) if rung.widest < WIDEST}
    found = {width for width in ends | set(tried) if width <= most}
    if max(tried) <= max(ends, default=0):
        found.add(most)  # of what is wider still nothing is known
    return sorted(found)


def merged(
    space: Space, ladders: Ladders, direction: str, widths: Sequence[int], shares: Shares
) -> dict[str, list[Rung]]:
    """The ladders of a direction. A width of which nothing is known keeps the rung of `ladders`."""
    names = [name for name in DIRECTIONS[direction] if name in space.ladders]
    steps = _climb(_Losses(space, ladders, direction, widths, shares), names)
    found: dict[str, list[Rung]] = {name: [] for name in names}
    for step in steps:
        served = widths[step.start : step.end]
        rung = _rung(step.ladder, step.values, served[-1])
        launches = [
            (width, shares.get((width, step.ladder, space.effective(step.ladder, rung, width)))) for width in served
        ]
        measured = [(width, round(share, 3)) for width, share in launches if share is not None]
        found[step.ladder].append(rung.model_copy(update={"measured": measured}))
    tiles, *wide = DIRECTIONS[direction]
    for name in (tiles, *wide):
        if name not in names or (name == names[-1] and not found[name]):
            found[name] = list(getattr(ladders, name))
        elif name in wide and not found[name]:  # one rung that serves nothing: rows that narrow have a tile
            narrow = max([1, *(rung.widest for rung in found[tiles])])
            found[name] = [getattr(ladders, name)[0].model_copy(update={"widest": narrow})]
    if names[-1] in wide:
        last = found[names[-1]]
        last[-1] = last[-1].model_copy(update={"widest": WIDEST})
    return found


def _rung(ladder: str, values: Values, widest: int) -> Rung:
    model, names = _MODELS[ladder]
    fields: dict[str, Any] = dict(zip(names, values, strict=True))
    return model(widest=widest, **fields)


def _valid(ladder: str, values: Values, widest: int) -> bool:
    try:
        _rung(ladder, values, widest)
    except ValidationError:
        return False
    return True


class _Losses:
    """What each rung loses at each width against the best launch of that width; None where it must not serve it."""

    def __init__(self, space: Space, ladders: Ladders, direction: str, widths: Sequence[int], shares: Shares) -> None:
        self.space, self.widths, self.shares = space, widths, shares
        names = DIRECTIONS[direction]
        self.best = [
            max((share for (at, name, _), share in shares.items() if at == width and name in names), default=None)
            for width in widths
        ]
        self.defaults = []
        for width in widths:
            name, rung = default(space, ladders, direction, width)
            self.defaults.append((name, tuple(getattr(rung, field) for field in _MODELS[name][1])))

    def rungs(self, ladder: str) -> Iterator[Values]:
        """All rungs that come out as a measured launch at some width."""
        found = dict.fromkeys(values for name, values in self.defaults if name == ladder)
        for width, name, launch in self.shares:
            if name == ladder:
                found.update(dict.fromkeys(self._behind(ladder, launch, width)))
        yield from found

    def _behind(self, ladder: str, launch: Launch, width: int) -> Iterator[Values]:
        if ladder not in ("forward", "backward"):
            yield launch
            return
        rows, columns, warps, *rest = launch
        tile = rows * -(-width // columns) * columns
        blocks = [power for power in POWERS if power >= columns] if columns == power_above(width) else [columns]
        for block in blocks:
            for elements in {tile, *(power for power in POWERS if power >= tile)}:
                if elements >= block:
                    yield (block, elements, warps, *(rest or (1, 0)))

    def of(self, ladder: str, values: Values) -> list[float | None]:
        losses: list[float | None] = []
        for index, width in enumerate(self.widths):
            share, best = self.shares.get((width, ladder, self._launch(ladder, values, width))), self.best[index]
            if share is not None and best is not None:
                losses.append(1 - share / best)
            elif self.defaults[index] == (ladder, values):
                losses.append(0.0 if best is None else 1.0)
            else:
                losses.append(None)
        return losses

    def _launch(self, ladder: str, values: Values, width: int) -> Launch:
        if ladder in ("forward", "backward"):
            columns, elements, warps, stages, programs = values
            return self.space.tile(ladder, (columns, elements, warps, stages, programs), width)
        return values


def _climb(losses: _Losses, names: Sequence[str]) -> list[_Step]:
    """The cheapest steps over all widths, those of whole rows before those of wider rows."""
    count = len(losses.widths)
    reached: list[tuple[Cost, tuple[_Step, ...]] | None] = [(NOTHING, ()), *[None] * count]
    for name in names:
        steps = _steps(losses, name)
        # A step goes on from any before it: of this ladder, or of the one that ended.
        for end in range(1, count + 1):
            for step in (steps[start, end] for start in range(end) if (start, end) in steps):
                before, here = reached[step.start], reached[end]
                if before is None:
                    continue
                cost = _sum(before[0], step.cost)
                if here is None or cost < here[0]:
                    reached[end] = cost, (*before[1], step)
    last = reached[count]
    if last is None:
        raise ValueError("no ladder serves all widths")
    return list(last[1])


def _steps(losses: _Losses, ladder: str) -> dict[tuple[int, int], _Step]:
    """The cheapest rung for every run of widths that one can serve."""
    found: dict[tuple[int, int], _Step] = {}
    for values in losses.rungs(ladder):
        lost = losses.of(ladder, values)
        for start in range(len(lost)):
            cost: Cost = (0.0, 1, 0.0)
            for end, loss in enumerate(lost[start:], start + 1):
                if loss is None:
                    break
                cost = _sum(cost, (max(0.0, loss - LOSS), 0, max(0.0, loss)))
                cheapest = found.get((start, end))
                if cheapest is not None and cost >= cheapest.cost:
                    continue
                if not _valid(ladder, values, losses.widths[end - 1]):
                    break
                found[start, end] = _Step(cost, ladder, values, start, end)
    return found


def _sum(one: Cost, other: Cost) -> Cost:
    # Rounded, so that equal losses are equal in any order.
    return round(one[0] + other[0], 9), one[1] + other[1], round(one[2] + other[2], 9)
