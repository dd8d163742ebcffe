"""A hook of mkdocs: links lead to the same places on the site as in the repository.

A page of docs/ keeps its name. Whatever else a page links to (the documents of the root, an example, a source file)
becomes part of the site under its own path, a Markdown file as a page. So no link needs an address on the internet.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
# The documents of the root that are in the navigation.
DOCUMENTS = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# The first page of the repository is not that of the site.
SAME = {"README.md": "docs/index.md"}
# Their pictures are up to 120 characters wide: they get the column of the table of contents.
WIDE = "explanation/"
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is linked to and is not in docs/, and what that links to."""
    todo = [*DOCUMENTS, *(DOCS + file.src_uri for file in files if file.is_documentation_page())]
    seen = set(todo)
    for path in todo:  # it grows
        if not path.startswith(DOCS):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            linked = [
                target
                for _, link in LINK.findall((ROOT / path).read_text(encoding="utf-8"))
                if (target := to_file(path, link))
            ]
            todo += [target for target in dict.fromkeys(linked) if target not in seen]
            seen.update(linked)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links of a page, from where it is in the repository to where it is on the site."""
    path = page.file.src_uri if page.file.generated_by else DOCS + page.file.src_uri
    here = posixpath.dirname(page.file.src_uri)
    if page.file.src_uri.startswith(WIDE):
        page.meta["hide"] = ["toc"]

    def on_site(match: re.Match[str]) -> str:
        target = to_file(path, match[2])
        return match[1] + (posixpath.relpath(target.removeprefix(DOCS), here or ".") if target else match[2])

    return LINK.sub(on_site, markdown)


def to_file(path: str, link: str) -> str | None:
    """The file of the repository that `path` links to; None for a folder, and for what is not there."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return SAME.get(target, target) if (ROOT / target).is_file() else None
