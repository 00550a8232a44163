"""What a user asks for: the pydantic model of a spec file.

`specs/README.md` says what every key means. The mappings of the stages stand in `normgen/stages`. A rule that spans
several keys of a mapping is a validator of the last of them: it finds in `info.data` those before that are right by
themselves, with their defaults, so that it holds whatever else is wrong.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import keyword
import reprlib
from itertools import pairwise
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from normgen.stages.affine import Affine
from normgen.stages.base import Model, Stage, fault
from normgen.stages.normalize import Eps, Normalize, Statistic
from normgen.stages.residual import Residual
from normgen.target import LADDERS, Ladders, Table, single_block_limit

MAX_HIDDEN = 2**20

InputDtype = Literal["float16", "bfloat16", "float32"]
NamedDtype = Literal["same", "float16", "bfloat16", "float32"]


def _distinct(values: list[str]) -> list[str]:
    if not values:
        raise fault("the list is empty; name at least one dtype")
    for value in values:
        if values.count(value) > 1:
            raise fault(f"{value} is listed twice; list each dtype once")
    return values


class Dtypes(Model):
    """The dtypes a call may use. float64 throughout is always accepted besides, for gradcheck."""

    input: list[InputDtype] = Field(["float16", "bfloat16", "float32"], description="Dtypes of x.")
    weight: list[NamedDtype] = Field(
        ["same", "float32"], description="Dtypes of weight and bias; `same` is the dtype of x."
    )
    output: NamedDtype = Field("same", description="Dtype of y; `same` is the dtype of x.")

    _input_distinct = field_validator("input")(_distinct)
    _weight_distinct = field_validator("weight")(_distinct)


def _shown(value: Any) -> str:
    """A value that is no mapping, as a file has it."""
    return str(value).lower() if isinstance(value, bool) else reprlib.repr(value)


def _none_or(model: type[Stage], key: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value == "none":
            return None
        if isinstance(value, (dict, BaseModel)):
            return value
        wanted = f"must be `none` or a mapping of the keys of {key}"
        raise fault(f"{wanted}, not {_shown(value)}; write `{key}: {{}}` for the defaults")

    return BeforeValidator(check, json_schema_input_type=Annotated[Any, WithJsonSchema({"const": "none"})] | model)


def _hidden(value: Any) -> Any:
    wanted = f"write `dynamic`, a width from 1 to {MAX_HIDDEN}, or a list of distinct widths such as [1024, 4096]"
    if value == "dynamic":
        return value
    widths = value if isinstance(value, (list, tuple)) else [value]
    if not widths or any(not isinstance(w, int) or isinstance(w, bool) for w in widths):
        raise fault(f"{_shown(value)} is not a width; {wanted}")
    ordered = tuple(sorted(widths))
    for width in (ordered[0], ordered[-1]):
        if not 1 <= width <= MAX_HIDDEN:
            raise fault(f"the width {width} is out of range; {wanted}")
    for width, following in pairwise(ordered):
        if width == following:
            raise fault(f"the width {width} is listed twice; {wanted}")
    return ordered


_WIDTH_SCHEMA: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_HIDDEN}
_HIDDEN_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"const": "dynamic"},
        _WIDTH_SCHEMA,
        {"type": "array", "items": _WIDTH_SCHEMA, "minItems": 1, "uniqueItems": True},
    ]
}

# Names of the generated module itself, and of what its operator is an attribute of; a function or a class of the same
# name would shadow one of them.
RESERVED_NAMES = frozenset(
    "torch triton tl gluon gl async_copy hashlib inspect functools math nn tensor Tensor once_differentiable reference"
    " x residual name".split()
)


def class_name(name: str) -> str:
    """Of the module's class: `rms_norm` gives `RmsNorm`."""
    return "".join(part.capitalize() for part in name.split("_"))


class Spec(Model):
    """One normalisation, over the last axis (width H) of every input."""

    name: str = Field(description="A Python identifier in lower case; file, function and operator are called this.")
    norm: Literal["rms", "layer"] = Field(description="rms: x / rms(x); layer: (x - mean) / std.")
    hidden: Annotated[str | tuple[int, ...], PlainValidator(_hidden), WithJsonSchema(_HIDDEN_SCHEMA)] = Field(
        "dynamic", description="The widths accepted: any, one (baked into the kernel) or a list."
    )
    eps: Eps = Field(description="The constant in the root, and where it stands.", examples=[{"value": 1e-6}])
    dtypes: Dtypes = Field(default_factory=lambda: Dtypes.model_validate({}), description="The dtypes of a call.")
    affine: Annotated[Affine | None, _none_or(Affine, "affine")] = Field(
        default_factory=lambda: Affine.model_validate({}), description="none, or the learned scale and shift."
    )
    residual: Annotated[Residual | None, _none_or(Residual, "residual")] = Field(
        None, description="none, or a second input added before the norm."
    )
    save: list[Statistic] = Field(
        default_factory=list,
        description="Row statistics the forward kernel writes for backward; what is not saved is computed again.",
    )
    grad: bool = Field(True, description="Emit the backward pass and autograd.")
    strategy: Literal["auto", "single_block", "welford"] = Field(
        "auto",
        description="auto: by width; single_block: a row in one block; welford: a loop over chunks of the row.",
    )

    @field_validator("name")
    @classmethod
    def _identifier(cls, name: str) -> str:
        rule = "use lower-case ASCII letters, digits and _, starting with a letter, at most 48 characters"
        if not (name.isascii() and name.isidentifier() and name[0].isalpha() and name == name.lower()):
            raise fault(f"{reprlib.repr(name)} is not a usable name; {rule}")
        if len(name) > 48:
            raise fault(f"the name is {len(name)} characters long; {rule}")
        made = class_name(name)
        for word, said in ((name, repr(name)), (made, f"{made}, the class that {name!r} makes,")):
            if keyword.iskeyword(word) or keyword.issoftkeyword(word):
                raise fault(f"{said} is a keyword of Python; choose another name")
            if hasattr(builtins, word):
                raise fault(f"{said} is a builtin of Python; choose another name")
            if word in RESERVED_NAMES:
                raise fault(f"{said} is a name that the generated module uses itself; choose another name")
        return name

    @field_validator("save")
    @classmethod
    def _save_existing_once(cls, save: list[Statistic], info: ValidationInfo) -> list[Statistic]:
        if "mean" in save and info.data.get("norm") == "rms":
            raise fault("an RMS norm has no mean; write save: [rstd] or save: []")
        for statistic in save:
            if save.count(statistic) > 1:
                raise fault(f"{statistic} is listed twice; list each statistic once")
        return sorted(save)

    @field_validator("strategy")
    @classmethod
    def _row_fits_block(cls, strategy: str, info: ValidationInfo) -> str:
        keys = info.data
        if strategy == "single_block" and {"norm", "hidden", "grad"} <= keys.keys():
            residual = keys.get("residual", "at fault") is not None  # what is at fault is not `none`
            limit = single_block_limit(LADDERS[keys["norm"], residual], keys["grad"])
            too_wide = [width for width in keys["hidden"] if width > limit] if keys["hidden"] != "dynamic" else []
            if too_wide:
                raise fault(
                    f"single_block keeps a row in registers, {limit} elements at most{' with grad' * keys['grad']}, "
                    f"not {too_wide[0]}; write strategy: auto or a smaller width"
                )
        return strategy

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The accepted widths in ascending order, or None where any width is."""
        return None if self.hidden == "dynamic" else cast("tuple[int, ...]", self.hidden)

    @property
    def ladders(self) -> Ladders:
        """How rows are launched, by width."""
        return LADDERS[self.norm, self.residual is not None]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The pipeline, in order."""
        norm = Normalize(norm=self.norm, placement=self.eps.placement, save=self.save)
        return tuple(stage for stage in (self.residual, norm, self.affine) if stage is not None)

    @property
    def digest(self) -> str:
        """SHA-256 of the spec's meaning: comments, order and spelled-out defaults do not count."""
        meaning = self.model_dump(mode="json", warnings=False)
        return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


class TunedSpec(Spec):
    """A spec with the table that `normgen tune` made for it, from a file of its own; it counts in the digest."""

    table: Table

    @property
    def ladders(self) -> Ladders:
        return self.table


class _SpecSchema(GenerateJsonSchema):
    """No key of a spec takes null: a key that is not wanted is left out."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        made = super().default_schema(schema)
        return {key: value for key, value in made.items() if (key, value) != ("default", None)}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec file, for editors."""
    schema = Spec.model_json_schema(schema_generator=_SpecSchema)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "normgen spec"}
