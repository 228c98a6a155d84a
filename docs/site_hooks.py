"""Hooks of the documents' site: pages from the top of the repository, and links to files that are no pages.

The documents link to source files by relative paths, which work on a git host. The site holds no source files: there
such a link leads to `extra.repository` (mkdocs.yml), or becomes text if that is empty. A link to a file that does not
exist stays as it is, and the strict build reports it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
TOP_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)\s]+)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents at the top of the repository as pages."""
    for source, page in TOP_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site where there are such, else to the repository."""
    sources = {page: source for source, page in TOP_PAGES.items()}
    uri = page.file.src_uri
    folder = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def in_site(link: str) -> str | None:
        """The path from this page to a linked page or picture of the site; None if the site does not hold it."""
        path = posixpath.normpath(posixpath.join(folder, link))
        found = TOP_PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if found is None or files.get_file_from_path(found) is None:
            return None
        return posixpath.relpath(found, posixpath.dirname(uri) or ".")

    def follow(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        if (found := in_site(link)) is not None:
            return f"[{text}]({found}{anchor})"
        path = posixpath.normpath(posixpath.join(folder, link))
        if not (ROOT / path).exists():
            return match[0]
        repository = config.extra["repository"]
        return f"[{text}]({repository}/blob/main/{path}{anchor})" if repository else text

    def show(match: re.Match[str]) -> str:
        return f"{match[1]}{in_site(match[2]) or match[2]}{match[3]}"

    return IMAGE.sub(show, LINK.sub(follow, markdown))
