"""One server of commands and one set of quantized folders for all tests of the command line."""

from __future__ import annotations

import pytest

from lowering_tests.cli.commands import DENSE, Commands


@pytest.fixture(scope="session")
def fp4(tmp_path_factory):
    """``fp4("inspect", folder)``: the command's exit status and what it wrote."""
    pytest.importorskip("transformers")
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def written(fp4, tmp_path_factory):
    """``written("modelopt")``: austen_dense, quantized into that format, once a session. Not to be changed."""
    parent, made = tmp_path_factory.mktemp("written"), {}

    def get(format: str):
        if format not in made:
            made[format] = parent / format
            fp4("quantize", DENSE, made[format], "--format", format, "--scale-search", "amax", "-q").must()
        return made[format]

    return get
