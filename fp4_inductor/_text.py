"""Text for people: names of repeated layers in groups, paragraphs and tables that fit the terminal."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence

COLUMNS = 80  # of an output that is no terminal
_NARROWEST = 40  # columns; narrower terminals wrap by themselves
_ALTERNATIVES = 8  # of one part of a name

_NUMBER = re.compile(r"((?<![\w.])\d+\.\d+(?!\w|\.\d)|(?<!\w)\d+(?!\w))")  # 0.5, 128, the 3 of layers.3.mlp; not the 4 of fp4

_Box = tuple[tuple[str, ...], ...]  # a name by parts, each with its alternatives; it stands for every combination of them


def terminal_width() -> int:
    """Columns of the terminal; 80 if the output is none."""
    return max(shutil.get_terminal_size((COLUMNS, 24)).columns, _NARROWEST)


# --- names -------------------------------------------------------------------------------------------------------


def group_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Dotted names with those of repeated parts in one: ``[(text, how many names it stands for), ...]``, in order of appearance.

    ``model.layers.0.mlp.up_proj``, ``model.layers.0.mlp.down_proj``, the same of layer 1, and ``lm_head`` become
    ``model.layers.0-1.mlp.{up_proj,down_proj}`` (4) and ``lm_head`` (1). A group stands for every combination of its parts, so no
    name is lost and none is added; a part of more than 8 alternatives says how many there are.
    """
    boxes: dict[_Box, None] = dict.fromkeys(tuple((part,) for part in name.split(".")) for name in names)
    longest = max(map(len, boxes), default=0)
    for numbers in (True, False):  # layers and experts first: other parts only have equals where the same layers have them
        for at in reversed(range(longest)):
            boxes = _merge(boxes, at, numbers)
    return [(".".join(map(_part, box)), _size(box)) for box in boxes]


def join_names(names: Iterable[str], limit: int | None = None) -> str:
    """:func:`group_names` in one line, at most ``limit`` groups, then how many names more there are."""
    groups = group_names(names)
    shown = groups[:limit]
    more = sum(count for _, count in groups[len(shown) :])
    return ", ".join([text for text, _ in shown] + ([f"... ({more} more)"] if more else []))


def merge_alike(texts: Iterable[str], figures: bool = True) -> dict[str, list[str]]:
    """Texts that differ in numbers only, in one: ``{merged text: the texts}``, in order of appearance.

    ``"model.layers.0.mlp: 3 of 128 experts"`` and ``"model.layers.1.mlp: 7 of 128 experts"`` become
    ``"model.layers.0-1.mlp: 3-7 of 128 experts"``: parts of names as in :func:`group_names`, other numbers from the least to the most.
    ``figures=False``: in numbers that are parts of names only.
    """
    kinds: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for text in dict.fromkeys(texts):
        pieces = _NUMBER.split(text)  # numbers stand at odd places
        kinds[tuple("" if at % 2 and (figures or _is_in_name(pieces, at)) else piece for at, piece in enumerate(pieces))].append(pieces)
    return {_alike(same): ["".join(pieces) for pieces in same] for same in kinds.values()}


def _is_in_name(pieces: list[str], at: int) -> bool:
    return pieces[at - 1].endswith(".") or (pieces[at + 1].startswith(".") and not pieces[at + 1].startswith(". "))


def _alike(texts: list[list[str]]) -> str:
    out = ""
    for at, pieces in enumerate(zip(*texts, strict=True)):
        numbers = list(dict.fromkeys(pieces))
        if len(numbers) == 1:
            out += numbers[0]
        elif _is_in_name(texts[0], at) and all(map(_is_number, numbers)):
            out += _part(tuple(sorted(numbers, key=int)))
        else:
            out += f"{min(numbers, key=float)}-{max(numbers, key=float)}"
    return out


def _merge(boxes: Iterable[_Box], at: int, numbers: bool) -> dict[_Box, None]:
    """Join the boxes that differ in part ``at`` only, where it is a number, or where it is none."""
    found: dict[tuple, list[_Box]] = defaultdict(list)
    for box in boxes:
        fits = at < len(box) and _is_number(box[at][0]) == numbers and (numbers or at > 0)  # first words tell names apart
        found[(box[:at], box[at + 1 :]) if fits else (box,)].append(box)
    merged: dict[_Box, None] = {}
    for same in found.values():
        alternatives = dict.fromkeys(a for box in same for a in box[at]) if len(same) > 1 else {}
        ordered = tuple(sorted(alternatives, key=int) if numbers else alternatives)
        merged[(*same[0][:at], ordered, *same[0][at + 1 :]) if len(same) > 1 else same[0]] = None
    return merged


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and part == str(int(part))


def _size(box: _Box) -> int:
    size = 1
    for alternatives in box:
        size *= len(alternatives)
    return size


def _part(alternatives: tuple[str, ...]) -> str:
    pieces = _ranges(list(map(int, alternatives))) if _is_number(alternatives[0]) else list(alternatives)
    if len(pieces) > _ALTERNATIVES:
        pieces = [*pieces[: _ALTERNATIVES - 2], f"... {len(alternatives)} in all"]
    return pieces[0] if len(pieces) == 1 else "{" + ",".join(pieces) + "}"


def _ranges(numbers: list[int]) -> list[str]:
    """``[0, 1, 2, 5]`` -> ``["0-2", "5"]``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [str(low) if low == high else f"{low}-{high}" for low, high in runs]


# --- paragraphs and tables ---------------------------------------------------------------------------------------


def wrap(text: str, width: int, head: str = "", margin: str = "") -> list[str]:
    """``text`` in lines of at most ``width`` columns; the first begins with ``head``, which is left as it is, the others with ``margin``.

    A word that is longer than a line is broken after a comma, else after a point or a slash, never inside a number.
    """
    lines, line, gap = [], head, ""
    for word in text.split():
        if len(line) + len(gap) + len(word) > width and line.strip():
            lines.append(line.rstrip())
            line, gap = margin, ""
        while len(line) + len(gap) + len(word) > width and (room := width - len(line)) > 1:
            at = _break(word, room)
            lines.append(line + word[:at])
            line, word = margin, word[at:]
        line, gap = line + gap + word, " "
    return [*lines, line.rstrip()]


def _break(word: str, room: int) -> int:
    """Where to break a word of which ``room`` characters fit."""
    for marks in (",", "./", "_|="):
        for at in range(room, room // 3, -1):
            if word[at - 1] in marks and not (word[at - 1] == "." and word[at - 2 : at - 1].isdigit() and word[at : at + 1].isdigit()):
                return at
    return room


def tabulate(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, optional: Sequence[str] = (), right: Sequence[str] = ()) -> list[str]:
    """A table of at most ``width`` columns.

    Args:
        optional: columns that go below their row while the table is too wide, in this order; the first without its name.
        right: columns aligned on the right.
    """
    below: list[str] = []
    while True:
        shown = [i for i, name in enumerate(header) if name not in below]
        widths = {i: max(len(row[i]) for row in (header, *rows)) for i in shown}
        left = [name for name in optional if name not in below]
        if sum(widths.values()) + 2 * (len(shown) - 1) <= width or not left:
            break
        below.append(left[0])

    def line(row: Sequence[str]) -> str:
        return "  ".join(row[i].rjust(widths[i]) if header[i] in right else row[i].ljust(widths[i]) for i in shown).rstrip()

    margin = " " * (widths[shown[0]] + 2)
    lines = []
    for row in (header, *rows):
        lines += [line(row)] if len(line(row)) <= width else wrap(line(row), width, margin=margin)
        if row is header:
            continue
        cells = {name: row[header.index(name)] for name in below}
        told = {name: cell for name, cell in cells.items() if cell not in ("", "-")}
        first = told.pop(optional[0], "") if optional else ""
        rest = ", ".join(f"{name}: {cell}" for name, cell in told.items())
        lines += [part for text in (first, rest) if text for part in wrap(text, width, margin, margin + "  ")]
    return lines
