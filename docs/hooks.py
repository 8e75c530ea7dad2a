"""Links from a page to a file of the repository, such as ``../examples/lora/lora.yaml``, work in the site as they do in the repository.

Each file that is named so becomes a page of its own, below ``source/``.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_OUTSIDE = re.compile(r"(?<=\]\()\.\./([\w./-]+)(?=\))")
_PAGE = "---\nsearch: {{exclude: true}}\n---\n# {name}\n\n~~~~{language}\n{text}\n~~~~\n"
_LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to. A link to a file that is not there stays, and fails the strict build."""
    root = Path(config.config_file_path).parent
    named = {name for page in files.documentation_pages() for name in _OUTSIDE.findall(page.content_string)}
    for name in sorted(named):
        if (root / name).is_file():
            text = (root / name).read_text(encoding="utf-8").rstrip("\n")
            page = _PAGE.format(name=name, language=_LANGUAGES.get(Path(name).suffix, "text"), text=text)
            files.append(File.generated(config, _source(name), content=page, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point such links at those pages."""
    return _OUTSIDE.sub(lambda link: _source(link[1]) if files.src_uris.get(_source(link[1])) else link[0], markdown)


def _source(name: str) -> str:
    return f"source/{name}.md"
