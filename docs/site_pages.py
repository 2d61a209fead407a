"""Pages of the site that are made from other files: the home page and the reference.

mkdocs calls `on_config` and `on_files` (mkdocs.yml, `hooks`). The home page is README.md, its links
turned to the site's; the reference has a page for each room of the library, of its docstrings.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_DOCSTRING = re.compile(r"(#.*\n|\s)*r?\"\"\"")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def rooms() -> list[tuple[str, list[str]]]:
    """The rooms of the library with their modules, by dotted name; loose files are one room."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "parallel3d").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        loose = len(parts) == 2
        name = ".".join(part for part in parts if part != "__init__")
        if not path.stem.startswith("__main") and _DOCSTRING.match(path.read_text()):
            found.setdefault("parallel3d" if loose else f"parallel3d.{parts[1]}", []).append(name)
    return sorted(found.items())


def reference_page(room: str, modules: list[str]) -> str:
    """The Markdown of one room's page: what mkdocstrings is to fill in, module by module."""
    parts = [f"# {room}"]
    for module in modules:
        short = module.removeprefix(f"{room}.")
        parts.append(f"::: {module}\n    options:\n      toc_label: {short}")
    return "\n\n".join(parts) + "\n"


def home_page(readme: str) -> str:
    """README.md as the home page: links into docs/ become the site's, others become plain text."""

    def turned(match: re.Match[str]) -> str:
        target = match[1]
        anchor = match[2] or ""
        if "://" in target:
            return match[0]
        return f"]({target.removeprefix('docs/')}{anchor})"

    readme = re.sub(r"\[([^\]]*)\]\((?!docs/|[a-z]+://|#)([^)\s]+)\)", r"\1 (`\2`)", readme)
    return _LINK.sub(turned, readme)


def plain_links_to_code(page: str) -> str:
    """A page of docs/ whose links to files outside docs/ are plain text, as the site lacks them."""
    return re.sub(r"\[([^\]]*)\]\(\.\./(?!planner|schedules)[\w/.-]+\.(?:py|json)\)", r"\1", page)


def on_config(config: Any) -> Any:
    """Complete the site's navigation by the pages that mkdocs.yml does not name."""
    named = set(re.findall(r"'([\w/.-]+\.md)'", str(config.nav)))
    folder = Path(config.docs_dir)
    rest = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.md"))
    if rest := [name for name in rest if name not in named]:
        config.nav.append({"More": rest})
    config.nav.append(
        {"Reference": [{room: f"reference/{room}.md"} for room, _ in rooms()]},
    )
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the home page, the pages of the reference, and the bundle of the planner's page."""
    from mkdocs.structure.files import File

    pages = {f"reference/{room}.md": reference_page(room, modules) for room, modules in rooms()}
    pages["index.md"] = home_page((ROOT / "README.md").read_text())
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    # Without the bundle the page says how to build it.
    bundle = ROOT / "build/plan_page/files.js"
    content = bundle.read_text() if bundle.is_file() else "// see docs/plan_page/build.py\n"
    files.append(File.generated(config, "plan_page/files.js", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to the source into plain text, as the site lacks the source's files."""
    return plain_links_to_code(markdown)
