"""The list of settings (for `--help`), and pydantic's errors as problems with remedies."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, to_jsonable_python

from parallel3d.base.reader import JsonObject
from parallel3d.base.section import ABSENT, Choice, Problem, Problems, Section

# Rule and remedy for each type of pydantic error; {..} are filled from pydantic's context.
_WORDING = {
    "int_type": ("must be an integer", "write a whole number without quotes, point or exponent"),
    "float_type": ("must be a number", "write a number without quotes"),
    "finite_number": ("must be finite", "write a finite number"),
    "bool_type": ("must be true or false", "write true or false without quotes"),
    "string_type": ("must be a string", "write a text in double quotes"),
    "tuple_type": ("must be a list", "write [...]"),
    "too_long": ("has too many items", "write exactly {max_length}"),
    "string_too_short": ("must not be empty", "write a name"),
    "string_pattern_mismatch": ("must be a plain name", "remove / and \\"),
    "greater_than": ("must be greater than {gt}", "raise it"),
    "greater_than_equal": ("must be at least {ge}", "write {ge} or more"),
    "less_than": ("must be less than {lt}", "lower it"),
    "less_than_equal": ("must be at most {le}", "write {le} or less"),
    "literal_error": ("must be {expected}", "write {expected}"),
    "mapping_type": ("must be a table of blocks", 'write {{"NAME": {{...}}}}'),
    "dict_type": ("must be a block of settings", "write {{...}}"),
    "model_type": ("must be a block of settings", "write {{...}}"),
}
_TYPO = 0.75  # difflib's ratio of a misspelt key, such as a name of four letters with two swapped
_OURS = "parallel3d."


@dataclass(frozen=True)
class SettingDoc:
    """One setting of the config.

    `default` is JSON, "" if the setting is required; `only` names the choices that have it.
    """

    path: str
    type: str
    default: str
    doc: str
    only: str = ""


@cache
def settings(section: type[Section], prefix: str = "") -> list[SettingDoc]:
    """Return every setting of a section and of the sections in it, in the order of the file.

    Entries of a list or table have only the settings that the section itself has not.
    """
    return list(_settings_of_section(section, prefix))


def _settings_of_section(section: type[Section], prefix: str) -> Iterator[SettingDoc]:
    for name, field in section.model_fields.items():
        path = f"{prefix}.{name}" if prefix else name
        default, kind = _written(field)
        doc = _doc(field)
        inner = _section_of(field.annotation)
        origin = get_origin(field.annotation)
        if choice := _choice_of(field):
            if field.default is None:
                yield SettingDoc(path, "block | null", default, doc)
            yield from _settings_of_choice(choice, path)
            continue
        if inner is None or origin in (Union, UnionType, Mapping):
            yield SettingDoc(path, kind, default, doc)
        if inner is not None:
            each = ""
            if origin is tuple:
                each = "[]"
            elif origin is Mapping:
                each = ".NAME"
            for setting in settings(inner, path + each):
                same = section.model_fields.get(setting.path.rpartition(".")[2])
                is_of_common_base = each and same and _doc(same) == setting.doc
                if not is_of_common_base:
                    yield setting


def _settings_of_choice(choice: Choice, path: str) -> Iterator[SettingDoc]:
    """Yield the settings of every class that may be chosen, shared ones once."""
    key = f"{path}.{choice.key}"
    names = list(choice.names())
    words = " | ".join(map(json.dumps, names))
    if not choice.beside:
        yield SettingDoc(key, words, "", f"The {choice.key}; it decides which settings follow.")
    choices_of_setting: dict[SettingDoc, list[str]] = {}
    for name in names:
        for setting in settings(choice.class_of(name), path):
            choices_of_setting.setdefault(setting, []).append(json.dumps(name))
    for setting, choice_names in choices_of_setting.items():
        only = f"{choice.key} {', '.join(choice_names)}" if len(choice_names) < len(names) else ""
        if setting.path != key:
            yield replace(setting, only=only)


Checked = TypeVar("Checked", bound=Section)


def checked(
    section: type[Checked], raw: JsonObject, source: str, context: object = None
) -> Checked:
    """Return `raw` as a section; raises Problems, which name `source`, for all that is wrong."""
    try:
        return section.model_validate(raw, context=context)
    except ValidationError as error:
        raise Problems(problems_in(error, raw, section), source) from None


def problems_in(error: ValidationError, raw: object, root: type[Section]) -> list[Problem]:
    """Return pydantic's errors in `raw`, a config of model `root`, as one problem per path."""
    problems_by_path: dict[str, list[Problem]] = {}
    for detail in error.errors():
        for problem in _problems_of(detail, raw, root):
            problems_by_path.setdefault(problem.path, []).append(problem)
    return [_either(problems) for problems in problems_by_path.values()]


def sound_settings(raw: JsonObject, problems: Sequence[Problem], root: type[Section]) -> JsonObject:
    """Return the valid top-level settings of `raw` and of its "parallel3d" block."""
    broken = {".".join(p.path.split(".")[:n]) for p in problems for n in (1, 2)}
    parallel3d_block = _section_of(root.model_fields["parallel3d"].annotation)
    assert parallel3d_block, "the root has a parallel3d block"
    sound: JsonObject = {}
    for model, prefix, raw_block in (
        (root, "", raw),
        (parallel3d_block, _OURS, raw.get("parallel3d")),
    ):
        if not isinstance(raw_block, dict):
            continue
        for name, field in model.model_fields.items():
            if prefix + name in broken:
                continue
            if name in raw_block:
                sound[name] = _reader(model, name).validate_python(raw_block[name])
            elif not field.is_required():
                sound[name] = field.default
    return sound


@cache  # building one takes milliseconds
def _reader(model: type[Section], name: str) -> TypeAdapter[object]:
    field = model.model_fields[name]
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter[object](annotation)


def _problems_of(detail: ErrorDetails, raw: object, root: type[Section]) -> Iterator[Problem]:
    path, value, model = _located(detail, raw, root)
    field = model.model_fields.get(path.rpartition(".")[2]) if model else None
    words = detail.get("ctx", {})
    cause = words.get("error")
    if detail["type"] == "extra_forbidden":
        yield from _unknown(path, value, model, root)
    elif detail["type"] == "missing":
        text = field.description or "" if field else "the list is too short"
        doc = " ".join(text.split()).partition(". ")[0]
        if field and field.examples:  # a block that can be pasted
            doc = ", or ".join([_pasted(path, field), *field.examples[1:]])
        yield Problem(path, ABSENT, "is required", f"add it: {doc}")
    elif isinstance(cause, Problems):
        yield from (problem.under(path) for problem in cause.problems)
    elif cause is not None:
        yield Problem(path, value, *_split(str(cause)))
    else:
        rule, remedy = _WORDING.get(detail["type"], (detail["msg"], "see --help"))
        shown = {name: _json_word(word) for name, word in words.items()}
        rule = rule.format(**shown)
        remedy = remedy.format(**shown)
        if detail["type"] == "model_type" and field and field.examples:
            remedy = f"write {_pasted(path, field)}"
        elif detail["type"] == "model_type" and field and (block := _section_of(field.annotation)):
            remedy = f"write {_started(block, value)}"
            words_beside = [arg for arg in get_args(field.annotation) if get_origin(arg) is Literal]
            remedy += "".join(f", or {_type_name(arg)}" for arg in words_beside)
        elif value is None and field and not field.is_required():
            default, _ = _written(field)
            remedy = f"leave it out, which means {default}, or {remedy}"
        yield Problem(path, value, rule, remedy)


def _started(block: type[Section], value: object) -> str:
    """Return a block as text with the settings that it needs, else with its first one.

    - `value`: what was written in place of the block; the first setting takes it if it can.
    """
    fields = block.model_fields
    if "enabled" in fields:
        return '{"enabled": true}'
    needed = [f'"{name}": ...' for name, field in fields.items() if field.is_required()]
    if needed:
        return f"{{{', '.join(needed)}}}"
    first, field = next(iter(fields.items()))
    is_choice = isinstance(value, str) and value in get_args(field.annotation)
    return f'{{"{first}": {json.dumps(value) if is_choice else "..."}}}'


def _pasted(path: str, field: FieldInfo) -> str:
    assert field.examples
    return f'"{path.rpartition(".")[2]}": {json.dumps(field.examples[0])}'


def _unknown(
    path: str, value: object, model: type[Section] | None, root: type[Section]
) -> Iterator[Problem]:
    """Yield the problem of an unknown key: why it is refused, else the setting it may mean."""
    section, _, key = path.rpartition(".")
    refused = root.refused.get(section, {})
    if key in refused:
        yield from refused[key].problems(path, value)
        return
    known = list(model.model_fields) if model else []
    own = [*known, *refused]
    listed = {setting.path: setting.only for setting in settings(root)}
    here = f"this block has: {', '.join(known)}" if known else "remove it"
    name = "".join(filter(str.isprintable, key)).lower().replace("-", "_")
    places = _places_by_name(listed, blocks=isinstance(value, dict))
    if only := listed.get(path):
        yield Problem(path, value, f"is only a setting of {only}", f"remove it; {here}")
    elif name in root.foreign:
        yield Problem(path, value, "is another program's name", f"set {root.foreign[name]}")
    elif section and (longer := [x for x in known if x.endswith(f"_{name}")]):
        yield Problem(path, value, "is not a setting", f'did you mean "{longer[0]}"?')
    elif (name in own or name not in places) and (near := _nearest(name, own)):
        yield Problem(path, value, "is not a setting", f'the nearest one is "{near}"')
    elif near := _nearest(name, places):
        yield Problem(path, value, "is not a setting here", f"did you mean {places[near]}?")
    else:
        yield Problem(path, value, "is not a setting", here)


def _nearest(name: str, known: Collection[str]) -> str | None:
    """Return the name that a misspelt one may mean, if there is one.

    It has the same first letter, or the same words and others: callbacks are no fallbacks.
    """
    words = set(name.split("_"))
    for near in get_close_matches(name, known, 3, _TYPO):
        near_words = set(near.split("_"))
        if name[:1] == near[:1] or words <= near_words or near_words <= words:
            return near
    return None


def _places_by_name(settings: Collection[str], blocks: bool) -> dict[str, str]:
    """Return the path of each setting, or of each of the `blocks`, by its name.

    Of equal names ours is taken, then the least nested.
    """
    paths = set(settings)
    if blocks:
        parts = [setting.split(".") for setting in settings]
        paths = {".".join(names[:n]) for names in parts for n in range(1, len(names))}
    last_first = sorted(paths, key=lambda p: (p.startswith(_OURS), -p.count("."), p))
    return {path.rpartition(".")[2]: path for path in last_first}


def _located(
    detail: ErrorDetails, raw: object, root: type[Section]
) -> tuple[str, object, type[Section] | None]:
    """Return an error's dotted path and value, and the section that the last name belongs to."""
    path: list[str] = []
    section: type[Section] | None = root  # the section of `raw`, or of its items
    owner = section
    of_items = False
    for part in detail["loc"]:
        outer = raw
        if isinstance(raw, dict) and (part in raw or detail["type"] == "missing"):
            raw = raw.get(part, ABSENT)
        elif isinstance(raw, list | tuple) and isinstance(part, int):
            raw = raw[part] if part < len(raw) else ABSENT
        else:
            break  # pydantic appends the member of a union to the path
        path.append(str(part))
        owner = None if of_items else section
        if of_items:
            of_items = False
            continue
        field = section.model_fields.get(str(part)) if section else None
        section = _section_of(field.annotation) if field else None
        of_items = field is not None and get_origin(field.annotation) in (tuple, Mapping)
        if field and (choice := _choice_of(field)) and isinstance(raw, dict):
            block = outer if choice.beside and isinstance(outer, dict) else raw
            written = str(block.get(choice.key, "")).lower()  # DeepSpeed ignores case
            name = next((n for n in choice.names() if n.lower() == written), choice.beside)
            section = choice.class_of(name) if name else None
    return ".".join(path), raw, owner


def takes_text(root: type[Section], path: str) -> bool:
    """Return True if the setting at a dotted path of a config is a text, or a text or null.

    - `root`: the section of the whole config.
    """
    section: type[Section] | None = root
    *blocks, name = (part for part in path.split(".") if not part.isdecimal())
    for block in blocks:
        field = section.model_fields.get(block) if section else None
        section = _section_of(field.annotation) if field else None
    field = section.model_fields.get(name) if section else None
    return field is not None and _type_name(field.annotation) in ("string", "string | null")


def _either(problems: list[Problem]) -> Problem:
    """Return one problem for a value that matches no member of a union."""
    rule = ", or ".join(dict.fromkeys(p.rule for p in problems))
    remedy = ", or ".join(dict.fromkeys(p.remedy for p in problems))
    return replace(problems[0], rule=rule, remedy=remedy)


def _split(text: str) -> tuple[str, str]:
    rule, _, remedy = text.partition("; ")
    return rule, remedy or "see --help"


def _doc(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _written(field: FieldInfo) -> tuple[str, str]:
    """Return a setting's default as JSON ("" if it is required) and its type, as in a config."""
    if field.is_required():
        return "", _type_name(field.annotation)
    for item in field.metadata:
        if isinstance(item, PlainSerializer) and item.return_type is str:  # a value with a text
            return json.dumps(str(field.default)), "string"
    return json.dumps(to_jsonable_python(field.default)), _type_name(field.annotation)


def _choice_of(field: FieldInfo) -> Choice | None:
    """Return the Choice that validates a field, if there is one."""
    validators = (item for item in field.metadata if isinstance(item, PlainValidator))
    return next((v.func for v in validators if isinstance(v.func, Choice)), None)


def _section_of(annotation: object) -> type[Section] | None:
    """Return the section class in an annotation (also in `Section | None`), if there is one."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is Annotated:
            candidate = get_args(candidate)[0]
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _json_word(word: object) -> str:
    """Return a value of pydantic's context, which is written as Python, as JSON text."""
    if isinstance(word, float) and word.is_integer():
        word = int(word) if abs(word) < 1e15 else f"{word:g}"  # 1e+40, not its 41 digits
    return {"True": "true", "False": "false"}.get(str(word), str(word).replace("'", '"'))


def _type_name(annotation: object) -> str:
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Annotated:
        return _type_name(args[0])
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin in (Union, UnionType):
        return " | ".join(_type_name(arg) for arg in args)
    if origin is tuple:
        return "[" + ", ".join("..." if a is Ellipsis else _type_name(a) for a in args) + "]"
    if origin in (Mapping, dict):
        return f"table of {_type_name(args[1])}s"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "block"
    names = {NoneType: "null", str: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(annotation, "any value")
