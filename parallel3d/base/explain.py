"""The settings as a list (for `--help`), and pydantic's errors as problems with remedies."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from parallel3d.base import suggest
from parallel3d.base.section import ABSENT, Beyond, Problem, Problems, Section

# The rule and the remedy of each kind of error that pydantic finds; {..} are pydantic's words.
_WORDING = {
    "int_type": ("must be an integer", "write a whole number without quotes, point or exponent"),
    "float_type": ("must be a number", "write a number without quotes"),
    "finite_number": ("must be finite", "write a finite number"),
    "bool_type": ("must be true or false", "write true or false without quotes"),
    "string_type": ("must be a string", "put it in double quotes"),
    "tuple_type": ("must be a list", "write [...]"),
    "too_long": ("has too many items", "write exactly {max_length}"),
    "string_too_short": ("must not be empty", "write a name"),
    "string_pattern_mismatch": ("must be a plain name", "write it without / and \\"),
    "greater_than": ("must be greater than {gt}", "raise it"),
    "greater_than_equal": ("must be at least {ge}", "write {ge} or more"),
    "less_than": ("must be less than {lt}", "lower it"),
    "less_than_equal": ("must be at most {le}", "write {le} or less"),
    "literal_error": ("must be {expected}", "write {expected}"),
    "mapping_type": ("must be a table of blocks", 'write {{"NAME": {{...}}}}'),
    "dict_type": ("must be a table of blocks", 'write {{"NAME": {{...}}}}'),
    "model_type": ("must be a block of settings", "write {{...}}"),
}


@dataclass(frozen=True)
class SettingDoc:
    """One setting: its dotted path, its type, its default as JSON ("" if required), its doc.

    `only` names the choices that have it (`family "gpt"`), "" if all have.
    """

    path: str
    type: str
    default: str
    doc: str
    only: str = ""


def settings(section: type[Section], prefix: str = "") -> list[SettingDoc]:
    """Every setting of a section and of the sections in it, in the order of the file."""
    found: dict[SettingDoc, list[str]] = {}
    for setting in _walk(section, prefix, section.beyond):
        found.setdefault(replace(setting, only=""), []).append(setting.only)
    choices = {
        path: (key, len(classes())) for path, (key, classes) in section.beyond.choices.items()
    }
    return [replace(s, only=_only(s.path, names, choices)) for s, names in found.items()]


def _only(path: str, names: list[str], choices: Mapping[str, tuple[str, int]]) -> str:
    for choice, (key, number) in choices.items():
        if path.startswith(f"{choice}.") and any(names) and len(names) < number:
            return f"{key} {', '.join(json.dumps(name) for name in names)}"
    return ""


def problems_in(error: ValidationError, raw: Any, root: type[Section]) -> list[Problem]:
    """What pydantic found in `raw`, one problem for each path; `root` is the model of `raw`."""
    found: dict[str, list[Problem]] = {}
    for detail in error.errors():
        for problem in _problems_of(detail, raw, root):
            found.setdefault(problem.path, []).append(problem)
    return [_either(problems) for problems in found.values()]


def sound_settings(
    raw: dict[str, Any], problems: Sequence[Problem], root: type[Section]
) -> dict[str, Any]:
    """The settings of `raw`, and of its "parallel3d" block, that have no problem of their own."""
    broken = {".".join(p.path.split(".")[:n]) for p in problems for n in (1, 2)}
    block, values = _section_at(root, "parallel3d", raw), raw.get("parallel3d")
    assert block, "the root has a parallel3d block"
    sound = _sound_fields(root, raw, "", broken)
    if isinstance(values, dict):
        sound |= _sound_fields(block, values, "parallel3d.", broken)
    return sound


def _sound_fields(
    model: type[Section], values: dict[str, Any], prefix: str, broken: set[str]
) -> dict[str, Any]:
    sound: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if prefix + name in broken:
            continue
        if name in values:
            sound[name] = _reader(model, name).validate_python(values[name])
        elif not field.is_required():
            sound[name] = field.default
    return sound


@cache  # making one takes milliseconds
def _reader(model: type[Section], name: str) -> TypeAdapter[Any]:
    field = model.model_fields[name]
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter[Any](annotation)


def _problems_of(detail: ErrorDetails, raw: Any, root: type[Section]) -> Iterator[Problem]:
    path, value = _located(detail["loc"], raw)
    section, _, key = path.rpartition(".")
    model = _section_at(root, section, raw)
    words = detail.get("ctx", {})
    cause = words.get("error")
    if detail["type"] == "extra_forbidden":
        yield from _unknown(path, value, model, root)
    elif detail["type"] == "missing":
        field = model.model_fields.get(key) if model else None
        doc = (field.description or "").split("\n")[0] if field else "the list is too short"
        if field and field.examples:  # a block that can be pasted
            doc = ", or ".join([f'"{key}": {json.dumps(field.examples[0])}', *field.examples[1:]])
        yield Problem(path, ABSENT, "is required", f"add it: {doc}")
    elif isinstance(cause, Problems):
        yield from (problem.under(path) for problem in cause.problems)
    elif cause is not None:
        yield Problem(path, value, *_split(str(cause)))
    elif value == "auto":
        ours = [s.path for s in settings(root) if '"auto"' in s.type + s.doc]
        autos = dict.fromkeys([*root.beyond.autos, *ours])
        remedy = f"write a value; auto may be: {', '.join(autos)}"
        yield Problem(path, value, "cannot be auto", remedy)
    else:
        rule, remedy = _WORDING.get(detail["type"], (detail["msg"], "see --help"))
        rule, remedy = (_format(text, words) for text in (rule, remedy))
        field = model.model_fields.get(key) if model else None
        if detail["type"] == "model_type" and field and field.examples:
            remedy = f'write "{key}": {json.dumps(field.examples[0])}'
        yield Problem(path, value, rule, remedy)


def _unknown(
    path: str, value: Any, model: type[Section] | None, root: type[Section]
) -> Iterator[Problem]:
    """A key that is no setting: refused by name where it is known, else with what may be meant."""
    section, _, key = path.rpartition(".")
    refused = root.beyond.refused.get(section, {})
    if key in refused:
        inside = root.beyond.refused.get(path, {}) if isinstance(value, dict) else {}
        for name in [name for name in value if name in inside] if inside else ():
            yield Problem(f"{path}.{name}", value[name], *_split(inside[name]))
        left = {k: v for k, v in value.items() if k not in inside} if inside else value
        if left or not inside:
            yield Problem(path, left, *_split(refused[key]))
        return
    known = list(model.model_fields) if model else []
    listed = {setting.path: setting.only for setting in settings(root)}
    yield suggest.unknown(path, value, known=known, refused=refused, listed=listed)


def _located(loc: tuple[int | str, ...], raw: Any) -> tuple[str, Any]:
    """Dotted path and value; pydantic ends a path with its names of a union's members."""
    path: list[str] = []
    for part in loc:
        if isinstance(raw, dict):
            raw = raw.get(str(part), ABSENT)
        elif isinstance(raw, list | tuple):
            raw = raw[int(part)] if int(part) < len(raw) else ABSENT
        else:
            break
        path.append(str(part))
    return ".".join(path), raw


def _either(problems: list[Problem]) -> Problem:
    """One problem for a value that fits no member of a union."""
    rules = dict.fromkeys(p.rule for p in problems)
    remedies = dict.fromkeys(p.remedy for p in problems)
    first = problems[0]
    return Problem(first.path, first.value, ", or ".join(rules), ", or ".join(remedies))


def _split(text: str) -> tuple[str, str]:
    rule, _, remedy = text.partition("; ")
    return rule, remedy or "see --help"


def _walk(
    section: type[Section], prefix: str, beyond: Beyond, only: str = ""
) -> Iterator[SettingDoc]:
    for name, field in section.model_fields.items():
        path = _join(prefix, name)
        inner, default, doc = _told(section, name)
        if path in beyond.choices:
            if field.default is None:
                yield SettingDoc(path, "block | null", default, doc, only)
            key, classes = beyond.choices[path]
            names = " | ".join(json.dumps(choice) for choice in classes())
            yield SettingDoc(
                f"{path}.{key}", names, "", f"Which {key}; it decides what else is here."
            )
            for choice, cls in classes().items():
                inside = _walk(cls, path, beyond, choice)
                yield from (s for s in inside if s.path != f"{path}.{key}")
        elif inner:
            if others := _beside_section(field.annotation):
                yield SettingDoc(path, f"block | {others}", default, doc, only)
            origin = get_origin(field.annotation)
            if origin is Mapping:
                yield SettingDoc(path, "table of blocks", default, doc, only)
            each = "[]" if origin is tuple else ".NAME" if origin is Mapping else ""
            yield from _walk(inner, path + each, beyond, only)
        else:
            yield SettingDoc(path, _type_name(field.annotation), default, doc, only)


@cache  # a list of all settings asks for each, and an error for the list
def _told(section: type[Section], name: str) -> tuple[type[Section] | None, str, str]:
    """The section that a field holds, if any; its default as JSON; its text."""
    field = section.model_fields[name]
    default = "" if field.is_required() else json.dumps(field.default, default=_block)
    return _section_of(field.annotation), default, " ".join((field.description or "").split())


def _block(value: Section) -> Any:
    return value.model_dump(mode="json")


def _section_of(annotation: Any) -> type[Section] | None:
    """The section class in the annotation, if it is one (or one or null)."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is Annotated:
            candidate = get_args(candidate)[0]
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _beside_section(annotation: Any) -> str:
    """What may stand in place of a section, "" if nothing may."""
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    return " | ".join(_type_name(choice) for choice in choices if _section_of(choice) is None)


def _section_at(root: type[Section], path: str, raw: Any) -> type[Section] | None:
    """The section that stands at `path`; where there is a choice, the one that `raw` makes."""
    model: type[Section] | None = root
    at, keyed = "", False
    for name in path.split(".") if path else []:
        if keyed:  # a key of a table of sections
            keyed, raw = False, raw.get(name) if isinstance(raw, dict) else None
            continue
        if name.isdigit() and isinstance(raw, list):  # an item of a list of sections
            raw = raw[int(name)]
            continue
        field = model.model_fields.get(name) if model else None
        model = _section_of(field.annotation) if field else None
        keyed = field is not None and get_origin(field.annotation) is Mapping
        at = _join(at, name)
        raw = raw.get(name) if isinstance(raw, dict) else None
        if at in root.beyond.choices and isinstance(raw, dict):
            key, classes = root.beyond.choices[at]
            model = classes().get(str(raw.get(key)))
    return model


def _join(prefix: str, path: str) -> str:
    return ".".join(part for part in (prefix, path) if part)


def _format(text: str, words: Mapping[str, Any]) -> str:
    """The text with pydantic's words in it, which it writes as Python does, in the file's way."""
    return text.format(**{name: _json_word(word) for name, word in words.items()})


def _json_word(word: Any) -> str:
    if isinstance(word, float) and word.is_integer():
        word = int(word) if abs(word) < 1e15 else f"{word:g}"  # 1e+40, not its 41 digits
    return {"True": "true", "False": "false"}.get(str(word), str(word).replace("'", '"'))


def _type_name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin in (Union, UnionType):
        return " | ".join(_type_name(arg) for arg in args)
    if origin is tuple:
        return "[" + ", ".join("..." if a is Ellipsis else _type_name(a) for a in args) + "]"
    if annotation is Any:
        return "any value"
    if origin in (Mapping, dict):
        return f"table of {_type_name(args[1])}"
    return {NoneType: "null", str: "string", int: "integer", float: "number", bool: "boolean"}[
        annotation
    ]
