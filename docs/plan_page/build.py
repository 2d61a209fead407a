"""Bundle the planner's page: Pyodide, wheels and floor 0, as one script beside the page.

`python docs/plan_page/build.py` writes build/plan_page/files.js; the next `mkdocs build` takes it
into the site (docs/site_pages.py). It needs npm and pip, and the page then needs no network.
"""

import base64
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from parallel3d import models
from parallel3d.base import reader
from parallel3d.config import RunConfig
from parallel3d.models.transformers import facts, spec

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "build" / "plan_page"
PYODIDE = "314.0.7"
# of that Pyodide
PYTHON = "3.14"
PLATFORM = "pyemscripten_2026_0_wasm32"
_RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
_WHEELS = (
    "pydantic",
    "pydantic_core",
    "rich",
    "typing_extensions",
    "typing_inspection",
    "annotated_types",
)
_ROOMS = ("base", "config", "model", "models", "plan", "schedule", "configs", "engine/optimizers")
_OTHERS = ("__init__.py", "launch/__init__.py", "launch/plan.py")
_NOT = ("blocks.py", "huggingface.py", "this-machine.json")
TP = (1, 2, 4, 8)
"""The numbers of tensor-parallel ranks for which costs of models of transformers are bundled."""


def fetch(folder: Path) -> dict[str, bytes]:
    """Download Pyodide and the wheels into `folder`; return the files of the bundle by name.

    The wheels have the versions of this environment, so that both plan with the same code.
    """
    pack = ["npm", "pack", "--silent", f"pyodide@{PYODIDE}"]
    archive = subprocess.run(pack, cwd=folder, check=True, capture_output=True, text=True).stdout
    wheels = [f"{name}=={version(name)}" for name in _WHEELS]
    platform = ["--platform", PLATFORM, "--python-version", PYTHON, "--only-binary", ":all:"]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *platform, *wheels]
    subprocess.run(pip, cwd=folder, check=True)
    files = {path.name: path.read_bytes() for path in folder.glob("*.whl")}
    with tarfile.open(folder / archive.strip()) as tar:
        for name in (*_RUNTIME, "pyodide-lock.json"):
            member = tar.extractfile(f"package/{name}")
            assert member is not None
            files[name] = member.read()
    return files


def answers(texts: Iterable[str]) -> dict[str, str]:
    """Return what planning asks about the models of transformers in the texts of configs.

    They are found out with torch, which the browser does not have.
    """
    found = {}

    def asked(module: str, request: str, purpose: str) -> str:
        text = facts.asked(module, request, purpose)
        found[json.dumps([module, request])] = text
        return text

    with patch.object(spec, "asked", asked):
        for text in texts:
            model = RunConfig.from_dict(reader.parse(text)).model
            if isinstance(model, spec.Config):
                asked(facts.ANATOMY, model.json_of_facts, "reading a model for the page")
                for layer in models.layers(model)[1:-1]:
                    for tp in TP:
                        spec.costs_of(layer.cost.model, tp)
    return found


def own_files() -> bytes:
    """Return a zip of floor 0, the command and the page's Python."""
    package = ROOT / "parallel3d"
    data = io.BytesIO()
    paths = [p for room in _ROOMS for p in (package / room).rglob("*") if p.name not in _NOT]
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [*paths, *(package / name for name in _OTHERS)]:
            if path.suffix in (".py", ".json"):
                archive.write(path, path.relative_to(ROOT))
        archive.write(Path(__file__).with_name("answer.py"), "answer.py")
        texts = [path.read_text() for path in sorted(reader.CONFIGS.glob("*.json"))]
        archive.writestr("answers.json", json.dumps(answers(texts)))
    return data.getvalue()


def main() -> None:
    """Write the bundle."""
    with tempfile.TemporaryDirectory() as folder:
        files = fetch(Path(folder)) | {"parallel3d.zip": own_files()}
    files["worker.js"] = Path(__file__).with_name("worker.js").read_bytes()
    encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "files.js").write_text(f"self.planFiles = {json.dumps(encoded)};\n")
    print(f"written to {OUTPUT}: {sum(map(len, files.values())) / 1e6:.1f} MB; now: mkdocs build")


if __name__ == "__main__":
    main()
