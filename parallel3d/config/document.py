"""All settings of a config, for `--help` and the documentation."""

import textwrap
from functools import partial

from parallel3d.base import explain
from parallel3d.base.explain import SettingDoc
from parallel3d.config.run_settings import RunSettings


def settings() -> list[SettingDoc]:
    """Return all settings of a ds.json, in the order of the file."""
    return explain.settings(RunSettings)


def help_text() -> str:
    """Return the end of `--help`: all settings with type, default and documentation."""
    lines = ["Every setting of the config is also an option:", ""]
    for setting in settings():
        default = f"default {setting.default}" if setting.default else "required"
        only = f", {setting.only} only" if setting.only else ""
        head = f"--{setting.path} {setting.type} ({default}{only})"
        wrap = partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)
        lines += wrap(head, 79, subsequent_indent="      ")
        lines += wrap(setting.doc, 79, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)
