"""The documentation: links and images resolve, the Python blocks of README.md and docs/ run, generated tables are what their source says."""

from __future__ import annotations

import csv
import importlib.util
import re
import warnings
from pathlib import Path

import pytest

import fp4_inductor

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "fp4_inductor", "lowering_tests")
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


# --- blocks of code -----------------------------------------------------------------------------------------------
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ASSETS = ROOT / "examples" / "assets"
# A reader's model and device, and what stands in for them here.
STAND_INS = {
    '"Qwen/Qwen3-8B"': repr(str(ASSETS / "austen_dense")),
    '"Qwen/Qwen3-30B-A3B"': repr(str(ASSETS / "austen_moe")),
    '"your/model-trained-2-4"': repr(str(ASSETS / "austen_sparse24")),
    '"cuda"': '"cpu"',
}


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in BLOCK.findall(text) if language in languages]


def program(text: str) -> str:
    """The Python blocks of a page, one behind the other, as its reader would paste them."""
    code = "\n".join(blocks(text, "python"))
    for given, here in STAND_INS.items():
        code = code.replace(given, here)
    return code


# How much a model writes, to calibrate and to measure on: a reader's text is 16 to 64 times as long and runs the same code.
LITTLE_TEXT = {
    **{"gptq.SEQUENCES": 8, "gptq.HELD_OUT": 2, "gptq.TOKENS": 64},
    **{"verify.SEQUENCES": 2, "verify.TOKENS": 64, "recover.SEQUENCES": 16, "recover.TOKENS": 64},
}


@pytest.mark.parametrize("page", [page for page in GUIDES if program(page.read_text())], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    for name, number in LITTLE_TEXT.items():
        monkeypatch.setattr(f"fp4_inductor.models.{name}", number)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program(page.read_text()), str(page), "exec"), {"__name__": "__main__"})


def test_code_that_does_not_run_is_found():
    with pytest.raises(AttributeError):
        exec(program("```python\nimport fp4_inductor\n```\nand\n```python\nfp4_inductor.quantise()\n```\n"), {})


def test_commands_of_the_pages_exist():
    """``make TARGET``, ``python FILE``."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [*GUIDES, ROOT / "CONTRIBUTING.md"]:
        shown = "\n".join([*blocks(page.read_text(), "sh"), *re.findall(r"`((?:make|python) [^`\n]*)`", page.read_text())])
        assert set(re.findall(r"^make ([\w-]+)", shown, re.MULTILINE)) <= targets, page
        assert [name for name in re.findall(r"^python (\S+\.py)", shown, re.MULTILINE) if not (ROOT / name).exists()] == [], page


def test_the_readme_is_the_first_minute():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert next(i for i, line in enumerate(lines, 1) if line == "```sh") < 20


def test_the_readme_says_what_the_data_say():
    """Decode, prompt and memory of the table: rows of benchmarks/results/decode.csv."""
    rows = _rows("decode.csv")
    text = (ROOT / "README.md").read_text()
    for batch, tokens in ((1, 1), (32, 1), (1, 2048)):
        found = {
            row["weights"]: float(row["ms"])
            for row in rows
            if (row["model"], row["mode"]) == ("qwen3-8b-shape x36 layers", "reduce-overhead") and (int(row["batch"]), int(row["tokens"])) == (batch, tokens)
        }
        bf16, ours = found["bf16"], found["nvfp4"]
        digits = 1 if tokens > 1 else 2
        assert f"{bf16:.{digits}f} ms" in text and f"{ours:.{digits}f} ms" in text and f"{bf16 / ours:.2f}x" in text, (batch, tokens)


def _rows(name: str) -> list[dict]:
    with (ROOT / "benchmarks" / "results" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs" / "api.rst").read_text()
    assert [name for name in fp4_inductor.__all__ if not re.search(rf"fp4_inductor[.:]+{name}$", reference, re.MULTILINE)] == []
