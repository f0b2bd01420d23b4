"""The documentation: links and images of every Markdown file resolve, the dispatch rows are those of kernels/table.py."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "csrc", "examples", "fp4_inductor", "lowering_tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def prose(text: str) -> str:
    """Without fenced blocks and code spans, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """Relative links of ``text``, as if it were ``page``, that lead nowhere."""
    lost = []
    for link in (first or second for first, second in LINK.findall(prose(text))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        there = target.exists() and target.resolve().is_relative_to(ROOT)
        if not there or (anchor and anchor not in anchors(text if not path else target.read_text())):
            lost.append(link)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page):
    assert broken(page, page.read_text()) == []


def test_a_broken_link_is_found():
    fine = "# A heading, `here`\n[a](LICENSE) [b](#a-heading-here) [c](https://nowhere) `[d](none)`\n"
    text = fine + "![e](no.svg) [f](#else) [g](README.md#no-such) [h](../LICENSE)\n"
    assert broken(ROOT / "README.md", text) == ["no.svg", "#else", "README.md#no-such", "../LICENSE"]


def test_the_dispatch_rows_are_those_of_the_table():
    """``make readme`` writes them."""
    spec = importlib.util.spec_from_file_location("write_readme", ROOT / ".ci" / "readme.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.block() in script.README.read_text()
