"""Write the support table into fp4_inductor/checkpoint/README.md from a run of its tests: ``make support`` (minutes).

The tests: lowering_tests/integrations/test_support.py.

python .ci/support.py [JUNIT_XML ...]          from these records instead of a new run
python .ci/support.py --check JUNIT_XML ...    fail unless that README says what they say
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "fp4_inductor" / "checkpoint" / "README.md"
BEGIN, END = "<!-- support: begin (make support) -->", "<!-- support: end -->"
TESTS = "lowering_tests/integrations/test_support.py"


def run() -> str:
    """The tests' own record."""
    with tempfile.TemporaryDirectory() as scratch:
        junit = Path(scratch) / "support.xml"
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "test_support", TESTS, f"--junitxml={junit}"], cwd=ROOT, check=False)
        return junit.read_text()


def table(*records: str) -> str:
    """The table of these records; where two have the same test, the later one counts."""
    sys.path.insert(0, str(ROOT))
    from lowering_tests.integrations.test_support import KNOWN, STEPS
    from lowering_tests.models.conftest import DENSE, MOE

    outcome: dict[tuple[str, str], str] = {}
    for case in (case for junit in records for case in ET.fromstring(junit).iter("testcase")):
        name = case.get("name") or ""
        if name.startswith("test_support["):
            family, step = name[len("test_support[") : -1].rsplit("-", 1)
            failed = case.find("failure") is not None or case.find("error") is not None
            outcome[family, step] = "**no**" if failed else "no" if case.find("skipped") is not None else "yes"
    lines = [f"| family | {' | '.join(STEPS)} | |", f"|---|{'---|' * len(STEPS)}---|"]
    for family in DENSE | MOE:
        cells = [outcome.get((family, step), "not run") for step in STEPS]
        why = "; ".join(reason for (f, _), reason in KNOWN.items() if f == family)
        lines.append(f"| {family} | {' | '.join(cells)} | {why} |")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return "\n".join([*lines, "", f"Run on {versions}, CPU."])


def check(*records: str) -> None:
    """The README's cells are those of the records; versions may differ."""
    said = README.read_text().split(BEGIN)[1].split(END)[0].split("\n\nRun on")[0].strip()
    true = table(*(Path(r).read_text() for r in records)).split("\n\nRun on")[0].strip()
    if said != true:
        sys.exit(f"the support table of {README.relative_to(ROOT)} is not what the tests say (make support writes it):\n{true}")


def main(*records: str) -> None:
    if records[:1] == ("--check",):
        return check(*records[1:])
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{table(*([Path(r).read_text() for r in records] or [run()]))}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
