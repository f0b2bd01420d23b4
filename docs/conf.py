"""Sphinx: the pages of this folder and an API reference from the docstrings. ``make docs`` builds both into build/docs; a warning is an error."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sphinx.util.nodes import make_refnode

import fp4_inductor

project = "fp4_inductor"
author = "the fp4_inductor authors"
copyright = "Apache-2.0"
version = release = fp4_inductor.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_parser"]
html_theme = "alabaster"
html_theme_options = {"description": "FP4 models, fast from plain PyTorch", "page_width": "1100px", "fixed_sidebar": True}
html_show_sphinx = False

myst_heading_anchors = 3
# Links out of this folder (to a README.md beside the code, to an image of benchmarks/results) are followed by lowering_tests/test_docs.py.
suppress_warnings = ["myst.xref_missing", "image.not_readable"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # "Args:" of a dataclass and its fields are one list, not two

nitpicky = True
# Names of other libraries, whose references are not read (the build needs no network), and what is described by its source only.
_OTHERS = (
    r"(torch|nn|Tensor|Module|dtype|transformers|PreTrained|os|pathlib|collections|optional|callable|iterable|Iterable|Callable"
    r"|Mapping|dict\[|list\[|tuple\[)"
)
nitpick_ignore_regex = [(r"py:.*", rf"{_OTHERS}.*"), (r"py:.*", r"fp4_inductor\.(ops|kernels)\..*")]


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _without_generated)
    app.connect("missing-reference", _by_last_name)


def _without_generated(app, what, name, obj, options, lines: list[str]) -> None:
    """A dataclass without a docstring of its own has Python's: its signature, which stands above it already."""
    if inspect.isclass(obj) and lines and lines[0].startswith(f"{obj.__name__}("):
        lines.clear()


def _by_last_name(app, env, node, contnode):
    """A class is described under its public name and referred to by the name of its own module, or by its last name: one object, if only one ends so."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    last = node["reftarget"].rpartition(".")[2]
    found = [(name, entry) for name, entry in domain.objects.items() if name.rpartition(".")[2] == last and not entry.aliased]
    if len(found) != 1:
        return None
    name, entry = found[0]
    return make_refnode(app.builder, node.get("refdoc", ""), entry.docname, entry.node_id, contnode, name)
