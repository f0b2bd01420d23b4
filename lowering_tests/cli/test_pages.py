"""The ``console`` blocks of README.md and docs/ run, one behind the other, and print what the page says. (Python blocks: test_docs.py.)"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lowering_tests.cli.commands import ROOT, Commands, environment

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+(?:\.\d+)?")
PROGRAM = "fp4-inductor "
# A quarter of the text that "gptq" has the model write: the figures of the pages hold within their tenth.
LITTLE_TEXT = "from fp4_inductor.models import gptq; gptq.SEQUENCES, gptq.HELD_OUT, gptq.TOKENS = 32, 4, 128"


def sessions(text: str) -> list[tuple[str, list[str]]]:
    """``(command, lines that it prints)`` of a page."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCK.findall(text):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def run(fp4: Commands, command: str, folder: Path) -> tuple[int, str]:
    """The exit status, and what a terminal shows of results and errors."""
    out = ""
    if command.startswith(PROGRAM):
        command, _, behind = command.removeprefix(PROGRAM).partition(" | ")
        done = fp4(*shlex.split(command), cwd=folder, before=LITTLE_TEXT)
        if not behind:
            return done.status, done.out or done.err
        out, command = done.must().out, behind
    command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
    shell = subprocess.run(["bash", "-c", command], cwd=folder, input=out, capture_output=True, text=True, env=environment(), check=False)
    return shell.returncode, shell.stdout + shell.stderr


def differences(expected: list[str], got: list[str]) -> list[str]:
    """Lines of ``expected`` that are not printed, in order; ``...`` stands for any lines. Numbers may differ by a tenth, spaces in number."""
    missing, at = [], 0
    anywhere = False
    for line in expected:
        if line == "...":
            anywhere = True
            continue
        places = range(at, len(got)) if anywhere else range(at, min(at + 1, len(got)))
        found = next((i for i in places if same(line, got[i])), None)
        if found is None:
            missing.append(line)
        else:
            at, anywhere = found + 1, False
    return missing + ([] if anywhere or at == len(got) else [f"not on the page: {line}" for line in got[at:]])


def same(a: str, b: str) -> bool:
    if re.sub(" +", " ", NUMBER.sub("#", a)) != re.sub(" +", " ", NUMBER.sub("#", b)):
        return False
    return all(float(x) == pytest.approx(float(y), rel=0.1, abs=1e-3) for x, y in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True))


@pytest.mark.parametrize("page", [p for p in PAGES if sessions(p.read_text())], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_print_what_it_says(fp4, tmp_path, page):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command, expected in sessions(page.read_text()):
        status, shown = run(fp4, command, tmp_path)
        assert status in (0, 1, 2), f"{command}\n{shown}"
        if command.startswith(f"{PROGRAM}run "):  # the text depends on the last bits of logits
            assert len(shown.strip()) > 20
        else:
            assert (command, differences(expected, shown.splitlines())) == (command, [])


def test_a_page_that_is_wrong_is_found():
    got = ["a 1.00 MB", "b", "c", "d"]
    assert differences(["a  1.04 MB", "...", "d"], got) == []
    assert differences(["a 1.5 MB", "...", "d"], got) == ["a 1.5 MB"]
    assert differences(["a 1 MB"], got)[0].startswith("not on the page: b")
    assert differences(["...", "e"], got)[0] == "e"
    assert sessions("```console\n$ x y\nz\n$ w\n```\n") == [("x y", ["z"]), ("w", [])]


def test_the_page_of_the_command_line_shows_every_command():
    shown = [command.split()[1] for command, _ in sessions((ROOT / "docs" / "command_line.md").read_text()) if command.startswith(PROGRAM)]
    assert set(shown) == {"quantize", "inspect", "verify", "export", "explain", "run"}
