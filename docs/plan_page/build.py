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
from importlib.metadata import version
from pathlib import Path

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
