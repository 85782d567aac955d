"""What goes with a draft: a card that says what it is, and a plot of how it came to be good. Text only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.runtime.distill.evaluation import Agreement, Evaluation
from forerun.runtime.distill.training import Point

PLOT = "acceptance.svg"
CARD = "README.md"
COST = "## Data and cost"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 56, 16, 46, 44
INK, GREEN, GREY, BLUE = "#222", "#3a9d5d", "#c9ccd1", "#4a7fc1"


@dataclass(frozen=True, slots=True)
class Making:
    """How a draft came about."""

    target: str
    target_revision: str
    licence: str | None  # of the target, as its folder states it
    layers: Sequence[int]
    total_layers: int
    head: int
    vocab_size: int
    bytes_on_disk: int
    tokens: int
    held_out: int  # conversations
    conversations: int  # trained on
    temperatures: Sequence[float]
    steps: int
    rows: int
    seed: int
    seconds: Mapping[str, float]  # by what took them, of this run
    machine: str
    dtype: str
    openings: int  # ways that questions begin
    before: str | None  # data and cost of the draft it began as, "" if not told; None: it began as the target's layers


def history_of(folder: Path) -> str:
    """What the card of the draft in `folder` says of its data and cost; "" without one."""
    path = folder / CARD
    told = path.read_text(encoding="utf-8").partition(f"{COST}\n\n")[2] if path.is_file() else ""
    return told.partition("\n## ")[0].strip()


def licence_of(folder: Path) -> str | None:
    """`license` of the front matter of README.md, or of config.json."""
    readme = folder / CARD
    if readme.is_file():
        front = readme.read_text(encoding="utf-8", errors="replace").split("---")
        found = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if len(front) > 2 else None
        if found:
            return found[1]
    stated = json.loads((folder / "config.json").read_bytes()).get("license")
    return stated if isinstance(stated, str) else None


def card(made: Making, result: Evaluation) -> str:
    """Markdown."""
    licence = made.licence or "not stated in the target's folder"
    seconds = ", ".join(f"{what} {_duration(took)}" for what, took in made.seconds.items())
    front = f"---\nlicense: {made.licence}\n---\n\n" if made.licence else ""
    rows = [("greedy", result.greedy), ("coupled, temperature 1", result.coupled)]
    rows += [
        (f"greedy, on text of temperature {warmth}", found) for warmth, found in result.greedy_by_temperature.items()
    ]
    table = "\n".join(f"| {name} | {_agreement(found)} |" for name, found in rows)
    written = made.conversations + made.held_out
    warmths = ", ".join(f"{warmth:g}" for warmth in made.temperatures)
    return f"""{front}# A draft for {made.target}

Made by `forerun distill` for speculative decoding. It guesses what its target says; alone it is of no use, and beside
another target, or another revision of it, it is refused.

| | |
| --- | --- |
| target | {made.target}, revision {made.target_revision} |
| layers | {len(made.layers)} of {made.total_layers}, copied from {", ".join(map(str, made.layers))} |
| head | {made.head} of {made.vocab_size} ids |
| on disk | {made.bytes_on_disk / 1e6:.1f} MB; the embedding is the target's |
| licence | {licence}; the draft derives from the target's weights |

## Acceptance

On answers of {made.held_out} conversations that it was not trained on:

| picks | positions | accepted | runner-up right, of rejections |
| --- | --- | --- | --- |
{table}

1 - TV at temperature 1: {result.overlap:.3f}.
The target's greedy token is in the head at {result.coverage:.1%} of positions.
A step takes {result.draft_ms:.2f} ms, a pass of the target {result.target_ms:.2f} ms: {result.cost:.3f} of it
({made.machine}, {made.dtype}).

![Acceptance against steps]({PLOT})

{COST}

No text from outside but the first words of questions, and no benchmark prompts: the target wrote both sides of
{written} conversations within its own chat template, {made.tokens} tokens with the template's; questions at
temperature 1, answers at {warmths}. Of most questions the first words were given, of {made.openings} kinds; texts
within them are other answers of the target.
{made.steps} steps of {made.rows} conversations on the target's distributions, seed {made.seed}.
Time of the run that finished it: {seconds}.
{_begun(made.before)}"""


def plot(history: Sequence[Point], title: str) -> str:
    """SVG of acceptance and 1 - TV against steps."""
    last = max(1, history[-1].step)
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: Point, value: float) -> str:
        return f"{LEFT + point.step / last * across:.1f},{TOP + (1 - value) * down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" fill="{INK}" font-size="14">{_escaped(title)}</text>',
    ]
    for tenths in range(0, 11, 2):
        y = TOP + (1 - tenths / 10) * down
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GREY}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" fill="{INK}" text-anchor="end">{tenths / 10:.1f}</text>')
    for quarter in range(5):
        x, y = LEFT + quarter / 4 * across, HEIGHT - BOTTOM + 18
        parts.append(f'<text x="{x:.1f}" y="{y}" fill="{INK}" text-anchor="middle">{last * quarter // 4}</text>')
    for number, (colour, label) in enumerate(((GREEN, "greedy acceptance"), (BLUE, "1 - TV, over the kept tokens"))):
        line = " ".join(place(p, p.overlap if number else p.acceptance) for p in history)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        x = LEFT + number * 180
        parts.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="38" fill="{INK}">{label}, held out</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" fill="{INK}" text-anchor="end">steps</text></svg>')
    return "\n".join(parts) + "\n"


def _begun(before: str | None) -> str:
    """What is said of the draft that it began as."""
    if before is None:
        return ""
    if not before:
        return "\nIt began as another draft of this target.\n"
    quoted = "\n".join(f"> {line}".rstrip() for line in before.splitlines())
    return f"\nIt began as another draft of this target, of which the same section says:\n\n{quoted}\n"


def _agreement(found: Agreement) -> str:
    return f"{found.positions} | {found.accepted:.3f} | {found.runner_up:.3f}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
