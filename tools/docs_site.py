"""Hook of mkdocs: gives pages the paths that they have in the repository, and adds the files that they link to."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Return the theme's files, `README.md`, `CHANGELOG.md`, `docs/`, and each file of the repository that any of
    them links to. mkdocs itself reports the links that lead nowhere.
    """
    found = Files([file for file in files if file.src_dir != config.docs_dir])
    pages = (f"docs/{file.src_uri}" for file in files if file.src_dir == config.docs_dir)
    waiting = ["README.md", "CHANGELOG.md", *pages]
    while waiting:
        path = waiting.pop()
        source = ROOT / path
        if path.startswith("../") or path in found.src_uris or not source.is_file():
            continue
        found.append(File.generated(config, path, abs_src_path=str(source)))
        if source.suffix == ".md":
            links = LINK.findall(source.read_text())
            waiting += [normpath(PurePosixPath(path).parent / link) for link in links if "://" not in link]
    return found
