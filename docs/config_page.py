"""Print docs/config.md, all settings: `python docs/config_page.py > docs/config.md`."""

import json
from collections.abc import Iterable, Iterator

from parallel3d.base.explain import SettingDoc
from parallel3d.config import auto, settings
from parallel3d.config.deepspeed_keys import BY_SECTION
from parallel3d.config.unused_key import ANY, Key

_INTRODUCTION = """\
# Settings

Look up any setting here, or with `--help` of any command:

- [DeepSpeed's settings](#deepspeeds-settings) have DeepSpeed's names, meaning and defaults.
- [The block "parallel3d"](#the-block-parallel3d) holds all other settings. DeepSpeed ignores it.
  Entries of `data.mixture` and `data.validation` also take the keys of `data` for their source.
- ["auto"](#auto) lists the values that replace Hugging Face's `"auto"`.
- [DeepSpeed's other keys](#deepspeeds-other-keys) are accepted if they have no effect, and
  otherwise refused by name.

A config is one JSON file, in which comments (`//`, `/* */`) and trailing commas are allowed. Set
any value on the command line by its path: `--parallel3d.mesh.tp 2`, or `--mesh.tp 2`. The prefix
`parallel3d.` is needed only if DeepSpeed has a key at that path. An entry of a list is set by its
number, from 0: `--data.mixture.1.text_field body`. Unknown keys, wrong types and settings that
contradict each other are errors, and all are reported at once.

Paths are relative to the working directory. `~` and environment variables in them are replaced; an
unset variable is an error. A dry run says which files, folders and tokenizers are missing here.

Counts of steps, samples, tokens and bytes are read as people write them, here and in the flags of
all commands: `1e9`, `"1_000_000"`, `"1.5B"`, `"64Ki"` (K, M, B or G, T and P are powers of 1000;
Ki, Mi, ... of 1024), sizes also as `"5GB"`, tokens also as `"10B tokens"`.

Written by `python docs/config_page.py > docs/config.md`; a test compares the two.
"""
_AUTO = """\
## "auto"

Hugging Face's `"auto"` is resolved before the file is checked, by the rules of transformers'
DeepSpeed integration with the defaults of `TrainingArguments`. Only `bf16.enabled` differs. A run
prints each resolved value at its start; `config.json` in its folder has them too.
"""
_KEYS = """\
## DeepSpeed's other keys

These keys of DeepSpeed 0.19.8 are not settings of parallel3d. The accepted values have no effect
here, and any other value is refused for the reason in the second column. Keys that begin with `_`
are comments, except in the block "parallel3d". `bfloat16` is read if `bf16` is missing. A block
that is switched off may have DeepSpeed's other keys of it, but not without its switch.
"""


def config_document() -> str:
    """Return the text of docs/config.md."""
    own = [s for s in settings() if s.path.startswith("parallel3d.") and s.doc[:3] != "As "]
    deepspeed = [s for s in settings() if not s.path.startswith("parallel3d.")]
    return "\n".join(
        [
            _INTRODUCTION,
            "## DeepSpeed's settings\n",
            _table(("setting", "type", "default", ""), map(_setting, deepspeed)),
            '## The block "parallel3d"\n',
            _table(("setting", "type", "default", ""), map(_setting, own)),
            _AUTO,
            _table(("setting", "value of auto"), ((f"`{r.path}`", r.words) for r in auto.RULES)),
            _KEYS,
            _table(("accepted values", "why other values are refused"), _keys()),
        ]
    )


def _setting(setting: SettingDoc) -> tuple[str, ...]:
    default = f"`{setting.default}`" if setting.default else "required"
    only = f"({setting.only}) " if setting.only else ""
    return f"`{setting.path}`", setting.type, default, only + setting.doc


def _keys() -> Iterator[tuple[str, ...]]:
    for section, keys in BY_SECTION.items():
        for name, key in sorted(keys.items()):
            path = f"{section}.{name}" if section else name
            yield f"`{path}`: {', '.join(_accepted(key)) or 'none'}", key.reason
            for item, reason in key.reasons.items():
                yield f"`{path}.{item}`: as above", reason


def _accepted(key: Key) -> Iterator[str]:
    if key.switch:
        yield f'`{{"{key.switch}": false}}`'
    yield from map(_shown, key.values)
    for item, values in key.items.items():
        yield f"`{item}`: " + " or ".join(map(_shown, values))


def _shown(value: object) -> str:
    return "any" if value is ANY else f"`{json.dumps(value)}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table in which rows that differ only in the first column are one row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *columns in rows:
        names.setdefault(tuple(columns), []).append(name)
    merged = (("<br>".join(paths), *columns) for columns, paths in names.items())
    cells = (
        " | ".join(cell.replace("|", "\\|") for cell in line)
        for line in (head, ("---",) * len(head), *merged)
    )
    return "\n".join(f"| {line} |" for line in cells) + "\n"


if __name__ == "__main__":
    print(config_document(), end="")
