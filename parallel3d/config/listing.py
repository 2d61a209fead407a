"""The list of all settings, for `--help` and docs/config.md."""

import textwrap

from parallel3d.base import explain
from parallel3d.base.explain import SettingDoc
from parallel3d.config.run import RunConfig


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
