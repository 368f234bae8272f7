"""A recording of the demo as an animated drawing: `make demo-picture` writes docs/demo.svg.

The demo runs as in `make demo`. The drawing shows its lines in the order and, but for long pauses, in the rhythm in
which they appeared.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

DEMO = Path(__file__).with_name("demo.py")
DRAWING = Path(__file__).parents[1] / "docs/demo.svg"

#: The recording ends before this line.
LAST = "4. The model"

#: The size of the terminal, and of a character and a line in pixels.
COLUMNS, ROWS, CHARACTER, LINE = 80, 26, 7.9, 17

#: Each line is shown for at least and at most so many seconds of the recording before the next one.
SHORTEST, LONGEST = 0.12, 1.1

#: So many seconds the whole is shown before it begins again.
PAUSE = 6.0

#: The colours of lines, by how they begin.
COLOURS = {"$": "#7ee787", "kill -9": "#ff7b72", "The newest complete": "#d2a8ff", "Over all": "#7ee787"}


class Line(NamedTuple):
    """A line, and the seconds between the line before and it."""

    text: str
    wait: float


def record(command: Sequence[str]) -> Iterator[Line]:
    """Run a command, and yield its lines up to the last one that is shown. The command runs to its end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        before, is_shown = time.monotonic(), True
        for text in process.stdout or ():
            now = time.monotonic()
            is_shown = is_shown and not text.startswith(LAST)
            if is_shown:
                yield Line(text.rstrip(), now - before)
            before = now
    if process.returncode:
        raise SystemExit(f"the demo failed with status {process.returncode}: nothing was drawn")


def draw(lines: Sequence[Line]) -> str:
    """Return the animated drawing of a terminal in which the lines appear, and which scrolls."""
    first = next((number for number, line in enumerate(lines) if line.text.startswith("$")), 0)
    times, now = [0.0] * (first + 1), 0.0  # the introduction and the first command are there from the beginning
    for line in lines[first + 1 :]:
        now += min(LONGEST, max(SHORTEST, line.wait))
        times.append(now)
    length = now + PAUSE
    rules = [
        f".l{n}{{animation:l{n} {length:.2f}s infinite}}{_appear(n, at / length)}" for n, at in enumerate(times) if at
    ]
    shifts = {100 * at / length: max(0, n + 1 - ROWS) * LINE for n, at in enumerate(times)}
    last = max(0, len(lines) - ROWS) * LINE
    steps = "".join(f"{at:.2f}%{{transform:translateY(-{shift}px)}}" for at, shift in shifts.items() if shift)
    scroll = f"@keyframes s{{0%{{transform:none}}{steps}100%{{transform:translateY(-{last}px)}}}}"
    texts = "\n".join(_text(number, line.text) for number, line in enumerate(lines) if line.text)
    width, height = COLUMNS * CHARACTER + 24, ROWS * LINE + 24
    style = f"""
text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e6edf3;white-space:pre}}
.s{{animation:s {length:.2f}s step-end infinite}}
{"".join(rules)}{scroll}
@media (prefers-reduced-motion:reduce){{text,.s{{animation:none!important}}.s{{transform:translateY(-{last}px)}}}}
"""
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" role="img">
<title>A training is killed on 4 ranks and on 2, and ends on 3 with the losses of the undisturbed one</title>
<style>{style}</style>
<rect width="{width:g}" height="{height}" rx="8" fill="#0d1117"/>
<svg x="12" y="12" width="{width - 24:g}" height="{height - 24}"><g class="s">
{texts}
</g></svg>
</svg>
"""


def _appear(number: int, at: float) -> str:
    return f"@keyframes l{number}{{0%{{opacity:0}}{100 * at:.2f}%{{opacity:0}}{100 * at + 0.01:.2f}%{{opacity:1}}}}\n"


def _text(number: int, text: str) -> str:
    colour = next((colour for start, colour in COLOURS.items() if text.startswith(start)), "")
    fill = f' style="fill:{colour}"' if colour else ""
    where = f'class="l{number}" x="0" y="{(number + 1) * LINE - 4}"'
    return f'<text xml:space="preserve" {where}{fill}>{escape(text)}</text>'


def main() -> None:
    """Record the demo, and write the drawing."""
    DRAWING.write_text(draw(list(record([sys.executable, str(DEMO)]))))


if __name__ == "__main__":
    main()
