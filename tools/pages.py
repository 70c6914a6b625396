"""Hook of mkdocs: the files of the repository's root as pages, and links that hold inside the site."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages of the site; name files that are not part of it instead of linking them."""
    outside = page.file.src_uri in PAGES.values()
    folder = ROOT if outside else (ROOT / "docs" / page.file.src_uri).parent

    def linked(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups(default="")
        if ":" in target:
            return match[0]
        path = (folder / target).resolve()
        if not path.exists():
            raise ValueError(f"{page.file.src_uri}: {target} does not exist")
        name = path.relative_to(ROOT).as_posix()
        inside = PAGES.get(name, name.removeprefix("docs/") if name.startswith("docs/") else None)
        if inside is None:
            return f"{text} (`{name}`)"
        up = "../" * page.file.src_uri.count("/")
        return f"{mark}[{text}]({up}{inside}{anchor})"

    return _LINK.sub(linked, markdown)
