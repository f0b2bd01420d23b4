"""Runs commands of the command line, each in a process of its own that is forked from this one, which has imported everything once.

Reads one request a line from stdin, JSON: ``args``, ``cwd``, ``env``, ``stdin``, ``stdout``, ``stderr`` (paths; ``stdout`` null: a pipe
that nobody reads) and ``before``: Python to run first. Answers with the exit status. A fork takes 20 ms, a start and the imports 4 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
import traceback

import torch
import transformers
from transformers.models.qwen3 import modeling_qwen3

import fp4_inductor.cli
from fp4_inductor import api
from fp4_inductor.integrations import pretrained
from fp4_inductor.integrations.pretrained import dense, text, write
from lowering_tests.forked import begin

IMPORTED = (torch, transformers, modeling_qwen3, fp4_inductor.cli, api, pretrained, dense, text, write)


def child(request: dict) -> None:
    os.chdir(request["cwd"])
    out = request["stdout"]
    if out is None:
        unread, target = os.pipe()
        os.close(unread)
    else:
        target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    errors = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    begin([os.open(request["stdin"], os.O_RDONLY), target, errors], request["env"], request["before"])
    sys.argv = ["fp4-inductor", *request["args"]]
    runpy.run_module("fp4_inductor", run_name="__main__", alter_sys=True)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 99  # neither a status of the command line nor one of Python
            try:
                child(json.loads(line))
            except SystemExit as done:
                status = done.code if isinstance(done.code, int) else 98
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
