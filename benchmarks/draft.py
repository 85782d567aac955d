"""What a draft brings, beside what the overlap model in core/formulas.py allows at the figures measured here.

    forerun bench --prompts P --every 4 --max-tokens 96 --ignore-eos --draft distilled --sources distilled \\
        --threads 1 --target-cores 0 --draft-cores 1 --compare assisted --json RUN.json
    python benchmarks/draft.py RUN.json [--json OUT.json]

Acceptance and corrections are asked of the answers of RUN.json, token by token up to their end; costs are measured now,
on the cores of the run, each side alone and beside the other.

The model is that of a chain with branches at its corrections: one acceptance for all tokens, and a partner that never
rests. Trees may do better (--chains leaves them out), text that is easy in stretches too; passes of a service, which
pick, walk and speak gRPC beside computing, do worse. A correction counts as prepared if the draft named it, grown or
not.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from forerun.commands.measure import Prompt, parse_prompts
from forerun.core.formulas import overlapped_speed, possible_waiting_share
from forerun.core.pages import KV
from forerun.core.params import Sampling
from forerun.core.pick import Picker
from forerun.runtime.distill.draft import is_draft
from forerun.runtime.distill.student import load_student
from forerun.runtime.distill.wide import WIDE, step
from forerun.runtime.models import load_causal_lm, resolve, revision
from forerun.runtime.passes import Run
from forerun.runtime.serving import LoadOptions, load
from forerun.text import TextModel
from forerun.up import UpOptions, draft_folder

CONTEXT = 256
"""Tokens before the passes that are timed."""

PASSES, MOST = 25, 8
"""Timed of each kind; most drafted tokens in a pass."""


@dataclass
class Agreement:
    """Of a draft with the answers."""

    positions: int = 0
    right: int = 0
    second: int = 0  # of the others, those where the runner-up was right
    named: int = 0  # of the others, those where some correction was

    @property
    def acceptance(self) -> float:
        return self.right / max(1, self.positions)

    @property
    def runner_up(self) -> float:
        return self.second / max(1, self.positions - self.right)

    @property
    def siblings(self) -> float:
        return self.named / max(1, self.positions - self.right)


@dataclass(frozen=True)
class Costs:
    """Milliseconds."""

    step_alone: float
    step: float
    passes_alone: list[float]  # [MOST + 1] by drafted tokens
    passes: list[float]


def agreements(run: dict[str, Any], target: str, draft: str) -> dict[str, Agreement]:
    """By category. Noise is that of the run: its seeds and positions."""
    settings = run["settings"]
    prompts = parse_prompts(Path(settings["prompts"]).read_text(encoding="utf-8").split("\n"), settings["prompts"])
    by_id = {prompt.question_id: prompt for prompt in prompts}
    text = TextModel.load(target)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    student = (
        load_student(draft, target, settings["dtype"], attention=WIDE)
        if is_draft(draft)
        else load_causal_lm(draft, settings["dtype"], attention=WIDE)
    )
    found: dict[str, Agreement] = {}
    for answer in track(run["answers"], "asking the draft"):
        prompt = by_id[answer["question_id"]]
        ids, said = _ids(text, prompt), answer["token_ids"]
        over = next((at + 1 for at, token in enumerate(said) if token in text.eos_token_ids), len(said))
        said = said[:over]  # what follows an end is no answer
        picker = Picker(Sampling(settings["temperature"], seed=settings["seed"] + prompt.index), text.vocab_size)
        with torch.inference_mode():
            logits = step(student, torch.tensor([[*ids, *said[:-1]]]))[0, len(ids) - 1 :].float().numpy()
        seen = found.setdefault(prompt.category, Agreement())
        for at, (row, token) in enumerate(zip(logits, said, strict=True)):
            guess = picker.guess(row, len(ids) + at)
            seen.positions += 1
            seen.right += guess.first == token
            seen.second += guess.second == token
            seen.named += token in guess.others
    return found


def _ids(text: TextModel, prompt: Prompt) -> list[int]:
    if prompt.chat and text.has_chat_template:
        return text.encode_chat([("user", prompt.text)])
    return text.encode(prompt.text)


def costs(target: LoadOptions, draft: LoadOptions, cores: tuple[list[int], list[int]]) -> Costs:
    """Each side in a process of its own on its cores."""
    context = multiprocessing.get_context("spawn")
    ends = []
    for options, pinned in zip((target, draft), cores, strict=True):
        ours, theirs = context.Pipe()
        context.Process(target=_side, args=(theirs, options, options is draft, pinned), daemon=True).start()
        theirs.close()  # so that the end of a side that fails is seen
        ours.recv()  # it is ready
        ends.append(ours)
    verifying, drafting = ends

    def times(end: Connection, rows: Sequence[int], beside: Connection | None = None) -> list[float]:
        if beside is not None:
            beside.send(None)
        end.send(list(rows))
        found: list[float] = end.recv()
        if beside is not None:
            beside.send([1])  # it stops to answer
            beside.recv()
        return found

    checked = range(1, MOST + 2)
    alone = times(drafting, [1])[0], times(verifying, checked)
    beside = times(drafting, [1], verifying)[0], times(verifying, checked, drafting)
    return Costs(alone[0], beside[0], alone[1], beside[1])


def _side(end: Connection, options: LoadOptions, draft: bool, cores: list[int]) -> None:
    """Times passes of so many rows when asked, and computes for nobody after a None until it is asked again."""
    if cores:
        os.sched_setaffinity(0, cores)
    model = load(options, draft=draft, sequences=2).model
    path = KV(model.pages).extend(CONTEXT + MOST + 1)
    tokens = tuple(at * 31 % model.vocab_size for at in range(CONTEXT + MOST + 1))
    model.forward([Run(path, tokens[:CONTEXT], 0, 1)])

    def once(rows: int) -> float:
        began = time.perf_counter()
        model.forward([Run(path, tokens[CONTEXT : CONTEXT + rows], CONTEXT, rows)])
        return 1e3 * (time.perf_counter() - began)

    end.send("ready")
    while True:
        try:
            asked = end.recv()
        except EOFError:
            return  # the benchmark is over
        while asked is None and not end.poll():
            once(1)
        if asked is not None:
            end.send([statistics.median(once(rows) for _ in range(PASSES)) for rows in asked])


def main(path: Path, out: Path | None) -> None:
    run = json.loads(path.read_text(encoding="utf-8"))
    services = run["settings"]["services"]
    options = UpOptions(services["target"], services["draft"])
    target, draft = resolve(options.target), draft_folder(options)
    if draft is None:
        raise SystemExit(f"{path} is of hints without weights of their own: {services['draft']}")
    if (made := run["settings"]["draft_revision"]) != revision(draft):
        raise SystemExit(f"{path} is of a draft of revision {made}, and {draft} is of {revision(draft)} now")
    if not services["threads"]:
        raise SystemExit(f"{path} does not say how many threads the target had; run the benchmark with --threads")
    run["settings"]["dtype"] = services["dtype"]
    seen = agreements(run, target, draft)
    pinned = services["target_cores"], services["draft_cores"]
    made_for = target if is_draft(draft) else None
    took = costs(
        LoadOptions(target, services["dtype"], services["threads"]),
        LoadOptions(draft, services["dtype"], target=made_for),
        pinned,
    )
    runs = {each["name"]: each for each in run["runs"]}
    speculative = next(each for name, each in runs.items() if name != "plain" and not name.startswith("transformers"))
    rows, whole = [], Agreement()
    for category, agreement in seen.items():
        whole = Agreement(*(a + b for a, b in zip(asdict(whole).values(), asdict(agreement).values(), strict=True)))
        rows.append(_row(category, agreement, took, runs, speculative))
    figures = {
        "acceptance": whole.acceptance,
        "runner_up": whole.runner_up,
        "siblings": whole.siblings,
        "costs_ms": asdict(took),
        "cost": took.step_alone / took.passes_alone[0],
        "contention": {"step": took.step / took.step_alone, "pass": took.passes[0] / took.passes_alone[0]},
        "waiting_share": speculative["waiting_share"],
        "waiting_possible": possible_waiting_share(
            whole.acceptance, speculative["drafted"] / speculative["passes"], whole.siblings
        ),
        "by_category": rows,
        **{name: _mean([row[name] for row in rows]) for name in ("speedup", "model", "of_model", "of_assisted")},
    }
    _show(rows, figures)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _row(
    category: str, agreement: Agreement, took: Costs, runs: dict[str, Any], speculative: dict[str, Any]
) -> dict[str, Any]:
    a, h = agreement.acceptance, agreement.siblings
    speed, best = overlapped_speed(a, h, took.step, took.passes)
    mine = speculative["by_category"][category]
    assisted = runs.get("transformers-assisted", {"by_category": {}})["by_category"].get(category)
    possible = speed * took.passes_alone[0]
    return {
        "category": category,
        "positions": agreement.positions,
        "acceptance": a,
        "runner_up": agreement.runner_up,
        "siblings": h,
        "lookahead": best,
        "model": possible,
        "speedup": mine["decode_ratio_to_plain"],
        "of_model": mine["decode_ratio_to_plain"] and mine["decode_ratio_to_plain"] / possible,
        "of_assisted": assisted and mine["decode_tokens_per_s"] / assisted["decode_tokens_per_s"],
    }


def _mean(values: list[float | None]) -> float | None:
    """Geometric."""
    known = [math.log(value) for value in values if value]
    return math.exp(statistics.fmean(known)) if known else None


def _show(rows: list[dict[str, Any]], figures: dict[str, Any]) -> None:
    took = figures["costs_ms"]
    table = Table(title="decoding, times plain; the last row: all positions, and geometric means of speeds", box=None)
    headings = ("category", "accepted", "runner-up", "named", "model", "measured", "of model", "of assisted")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "category" else "right")
    names = ("acceptance", "runner_up", "siblings", "model", "speedup", "of_model", "of_assisted")
    for row in [*rows, {"category": "all (speeds: mean)", **figures}]:
        table.add_row(row["category"], *("-" if row[name] is None else f"{row[name]:.2f}" for name in names))
    console = Console(width=110)
    console.print(table)
    console.print(
        f"step {took['step_alone']:.2f} ms alone, {took['step']:.2f} beside the target; pass of 1 to {MOST + 1} tokens "
        f"{', '.join(f'{each:.1f}' for each in took['passes_alone'])} ms alone, "
        f"{', '.join(f'{each:.1f}' for each in took['passes'])} beside the draft"
    )
    console.print(
        f"waiting {figures['waiting_share'] or 0:.0%} of passes, {figures['waiting_possible']:.0%} possible at "
        "this acceptance"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what forerun bench --json wrote")
    parser.add_argument("--json", type=Path, dest="out", help="write all figures to this file")
    given = parser.parse_args()
    main(given.run, given.out)
