"""The text of docs/config.md: every setting, and every key of DeepSpeed."""

import json
import textwrap
from collections.abc import Iterator

from parallel3d.base import explain
from parallel3d.base.explain import SettingDoc
from parallel3d.config import auto
from parallel3d.config.deepspeed_keys import ANY, BY_SECTION, Key
from parallel3d.config.run import RunConfig

_INTRODUCTION = """\
# Settings

Written by `python -m parallel3d.config > docs/config.md`; a test compares the two. `--help` of each
command has the same list.

A config is one JSON file. DeepSpeed's keys stand in it as in any `ds.json`, with DeepSpeed's
meaning and defaults; everything else is in the block `"parallel3d"`, which DeepSpeed ignores.
Comments (`//`, `/* */`) and trailing commas are allowed. Any value can be set on the command line
by its path: `--parallel3d.mesh.tp 2`; a path below `parallel3d.` needs no prefix where no key of
DeepSpeed's has it: `--mesh.tp 2`. A key that is not in these tables, a wrong type, and settings
that do not go together are errors, all named at once.

Every key of DeepSpeed 0.19.8 stands in one of two tables: the settings, which work, or the other
keys (the last table), which are accepted where they change nothing and else refused by name.
"""
_AUTO = """\
## "auto"

Hugging Face's `"auto"` is resolved before anything else reads the file, by the rules of
transformers' DeepSpeed integration and with the defaults of its `TrainingArguments`; a run says at
its start what each became, and `config.json` in its folder holds the values. In one place the rule
is our own: `bf16.enabled`, which Hugging Face resolves to false, and the training to fp32.
"""
_KEYS = """\
## DeepSpeed's other keys

These keys are no settings of parallel3d. A value in the second column says what parallel3d does
anyway, or switches off what it does not have: it is accepted and left out. Any other value is
refused, with the reason in the third column. Keys that begin with `_` are comments, in every block
of DeepSpeed's part. The old names `bfloat16`, `cpu_offload` and
`cpu_offload_param` are read as DeepSpeed reads them where the new ones are not there.
"""


def config_document() -> str:
    """The text of docs/config.md."""
    ours = [s for s in settings() if s.path.startswith("parallel3d.")]
    theirs = [s for s in settings() if not s.path.startswith("parallel3d.")]
    parts = [
        _INTRODUCTION,
        "## DeepSpeed's settings\n",
        _table(("setting", "type", "default", ""), map(_setting, theirs)),
        '## The block "parallel3d"\n',
        _table(("setting", "type", "default", ""), map(_setting, ours)),
        _AUTO,
        _table(("setting", "auto means"), ((f"`{r.path}`", r.words) for r in auto.RULES)),
        _KEYS,
        _table(("key", "accepted", "refused, because it"), _keys()),
    ]
    return "\n".join(parts)


def _setting(setting: SettingDoc) -> tuple[str, ...]:
    default = f"`{setting.default}`" if setting.default else "required"
    only = f"({setting.only}) " if setting.only else ""
    return f"`{setting.path}`", setting.type, default, only + setting.doc


def _keys() -> Iterator[tuple[str, ...]]:
    for section, keys in BY_SECTION.items():
        for name, key in sorted(keys.items()):
            path = f"{section}.{name}" if section else name
            yield f"`{path}`", ", ".join(_accepted(key)), key.reason
            for item, reason in key.reasons.items():
                yield f"`{path}.{item}`", "as above", reason


def _accepted(key: Key) -> Iterator[str]:
    if key.switch:
        yield f'`{{"{key.switch}": false}}`'
    for value in key.values:
        yield f"`{json.dumps(value)}`"
    for item, values in key.items.items():
        words = ("any" if value is ANY else f"`{json.dumps(value)}`" for value in values)
        yield f"`{item}`: " + " or ".join(words)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {line} |" for line in cells) + "\n"


def settings() -> list[SettingDoc]:
    """Every setting of a ds.json, in the order of the file."""
    return explain.settings(RunConfig)


def help_text() -> str:
    """Every setting with its type, default and doc, for `--help`."""
    lines = []
    for setting in settings():
        default = f"default {setting.default}" if setting.default else "required"
        only = f", {setting.only} only" if setting.only else ""
        doc = textwrap.wrap(setting.doc, 92)
        lines += [f"--{setting.path} {setting.type} ({default}{only})", *(f"    {x}" for x in doc)]
    return "\n".join(lines)
