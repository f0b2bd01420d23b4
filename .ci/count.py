"""Fail unless tests ran, none failed, and the skipped gpu tests are exactly the collected ones (all of them, or none on a GPU).

python .ci/count.py JUNIT_XML
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET


def gpu_tests_collected() -> int:
    """Counted by a second pytest run, so that a broken skip rule cannot count itself."""
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only"], capture_output=True, text=True, check=False)
    if run.returncode not in (0, 5):  # 5: nothing collected
        sys.exit(f"collecting the gpu tests failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    found = re.search(r"^(\d+)(?:/\d+)? tests? collected", run.stdout, re.MULTILINE)
    return int(found.group(1)) if found else 0


def main(junit: str) -> int:
    import torch

    cases = list(ET.parse(junit).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    for_want_of_a_gpu = [c for c in skipped if (c.find("skipped").get("message") or "").startswith("no CUDA device")]
    passed = len(cases) - len(failed) - len(skipped)
    gpu = gpu_tests_collected()
    expected = 0 if torch.cuda.is_available() else gpu
    print(f"gpu tests: {gpu} collected, {len(for_want_of_a_gpu)} skipped for want of a GPU, {expected} expected to be")
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    if passed == 0:
        print("no test ran")
    return int(passed == 0 or bool(failed) or len(for_want_of_a_gpu) != expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
