"""How far a reader has to follow a toy run until its first step.

    python benchmarks/reading_path.py

Runs launch/train.py on one process, twice: the second time the corpus is cached, and each call of a
library function is counted. A change of file is a call or a return into another library file than
the one before. The config's path are the calls, in and below `train()`, that are handed the config
or a section of it: the files that see it, and its stays there. An accessor, a property
of one return, is read like an attribute: stays are counted without and with accessors.
"""

import argparse
import ast
import inspect
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
LIBRARY = tuple(str(ROOT / name) + "/" for name in ("parallel3d", "models", "launch"))
# Not its hardware, which is no section of the config.
CONFIG = {
    f"parallel3d.config.{path.stem}"
    for path in (ROOT / "parallel3d/config").glob("*.py")
    if path.stem != "hardware"
}
SETTINGS = {
    "train.steps": 1,
    "train.evaluate_every": 0,
    "run.save_weights": False,
    "run.name": "path",
    "data.source": "text",
    "data.documents": "line",
    "data.vocab_size": 300,
    "data.sequence_length": 32,
}


def accessors() -> set[tuple[str, str]]:
    """Return (file, name) of each property of the library whose body is one return."""
    names = set()
    for folder in LIBRARY:
        for path in Path(folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and is_accessor(node):
                    names.add((str(path), node.name))
    return names


def is_accessor(function: ast.FunctionDef) -> bool:
    """Return True for a property whose body is one return, below its docstring."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    statements = function.body
    if ast.get_docstring(function) is not None:
        statements = statements[1:]
    is_short = len(statements) == 1
    return decorators == ["property"] and is_short and isinstance(statements[0], ast.Return)


class _FirstStep(BaseException):
    """The first optimizer step begins."""


class Stays:
    """The files that a reader visits one after another."""

    def __init__(self) -> None:
        self.files = set[str]()
        self.count = 0
        self._last = ""

    def visit(self, file: str) -> None:
        """Count a call in `file`, which is a stay if the last one was elsewhere."""
        if file != self._last:
            self._last = file
            self.count = self.count + 1
            self.files.add(file)


class Trail:
    """Counts of the calls seen so far."""

    def __init__(self) -> None:
        self.all = Stays()
        self.config = Stays()
        self.config_by_accessors = Stays()
        self._accessors = accessors()
        self._trains = False
        self.before_self_test: tuple[int, int] | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count a call; `sys.setprofile` calls this."""
        if event == "return" and frame.f_back is not None:
            frame = frame.f_back  # a reader goes back to the caller
        elif event != "call":
            return
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARY):
            return
        # A reader does not call modules, bodies of classes and comprehensions, nor a generator for
        # each of its items.
        is_body = not code.co_flags & inspect.CO_OPTIMIZED
        if "<" in code.co_name or code.co_flags & inspect.CO_GENERATOR or is_body:
            return
        file = code.co_filename
        self.all.visit(file)
        if event == "call" and (file, code.co_name) == (str(ROOT / "launch/train.py"), "train"):
            self._trains = True
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = (frame.f_locals.get(name) for name in given)
        is_handed = any(type(v).__module__ in CONFIG for v in values)
        if self._trains and is_handed:
            self.config_by_accessors.visit(file)
            if (file, code.co_name) not in self._accessors:
                self.config.visit(file)
        if event == "call" and code.co_qualname == "Engine.step":
            if self.before_self_test is None:
                self.before_self_test = len(self.all.files), self.all.count
            if frame.f_back and frame.f_back.f_code.co_filename.endswith("train/trainer.py"):
                raise _FirstStep


def main() -> None:
    """Train twice in a folder of its own, and print the counts of the second run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from launch import train
    from parallel3d.config import RunConfig
    from parallel3d.data.prepare import prepare

    with TemporaryDirectory() as folder:
        text = Path(folder, "a.txt")
        text.write_text("".join(f"the quick brown fox jumps over {i} dogs\n" for i in range(100)))
        more = {"data.paths": [str(text)], "data.cache": folder, "run.directory": f"{folder}/runs"}
        words = [f"--parallel3d.{k}={json.dumps(v)}" for k, v in (SETTINGS | more).items()]
        sys.argv = ["train.py", "--config", "ds.json", *words]
        time.sleep(2.5)  # a file that changed just now is read again, whatever is cached
        args, overrides = train.parse_args()
        prepare(RunConfig.from_json(args.config, overrides).data)
        seen = Trail()
        sys.setprofile(seen)
        try:
            train.main()
        except _FirstStep:
            pass
        finally:
            sys.setprofile(None)
    assert seen.before_self_test
    for step, (files, changes) in (
        ("self-test's first optimizer step", seen.before_self_test),
        ("run's first optimizer step", (len(seen.all.files), seen.all.count)),
    ):
        print(f"until the {step}: {files} files, {changes:,} changes of file")
    print(
        f"the config through train(): {len(seen.config.files)} files, {seen.config.count} stays "
        f"({seen.config_by_accessors.count} with accessors)"
    )
    sys.stdout.flush()
    os._exit(0)  # not through the end of a process whose threads are still at work


if __name__ == "__main__":
    main()
