"""`forerun generate`: one prompt to a running coordinator, the answer as it comes, a line about how fast."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, TextIO

import typer

from forerun.client import DEFAULT_ADDR, Client, build_request
from forerun.commands import failure
from forerun.commands.answer import Answer, receive
from forerun.commands.measure import split_names
from forerun.core.errors import InvalidRequest
from forerun.v1 import generation_pb2


class VerificationOption(StrEnum):
    """What --verification takes."""

    COUPLED = "coupled"
    REJECTION = "rejection"


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.", show_default=False)],
    addr: Annotated[str, typer.Option(help="The coordinator's host:port.")] = DEFAULT_ADDR,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text and summary.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the model's chat template, or not. Default: if it has one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt (implies --chat).")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Default: what fits the context.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="No end token before. Default 0.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 is no limit. Default 0.")] = None,
    top_p: Annotated[float | None, typer.Option(help="In (0, 1]. Default 1.")] = None,
    min_p: Annotated[float | None, typer.Option(help="In [0, 1). Default 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same request and seed, same answer. Default: random.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding; the same tokens.")] = False,
    sources: Annotated[str | None, typer.Option(help="Hint sources, as a,b. Default: all attached.")] = None,
    max_draft_tokens: Annotated[int | None, typer.Option(help="Most drafted tokens checked in a pass.")] = None,
    verification: Annotated[VerificationOption | None, typer.Option(help="Default coupled.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Default: drawn at random.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the served one.")] = None,
    traceparent: Annotated[
        str | None, typer.Option(envvar="TRACEPARENT", help="W3C trace context to join.", show_default=False)
    ] = None,
) -> None:
    """Stream the answer to PROMPT to stdout, then print a one-line summary to stderr."""
    knobs: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "ignore_eos": True if ignore_eos else None,
        "speculation": False if no_speculation else None,
        "max_draft_tokens": max_draft_tokens,
        "verification": None if verification is None else verification.value,
        "request_id": request_id,
        "model": model,
    }
    if system is not None and chat is False:
        raise typer.BadParameter("--system goes through the chat template, --raw does not")

    async def main() -> None:
        knobs["sources"] = None if sources is None else split_names(sources)
        text = sys.stdin.read() if prompt == "-" else prompt
        async with Client(addr) as client:
            with failure.explained(client):
                through_chat = chat if chat is not None else system is not None or await has_chat_template(client)
                request = prompt_request(text, chat=through_chat, system=system, **knobs)
                await run_prompt(client, request, as_json=as_json, traceparent=traceparent)

    failure.run(main())


async def has_chat_template(client: Client) -> bool:
    return bool((await client.model_info()).chat_template)


def prompt_request(text: str, *, chat: bool, system: str | None = None, **knobs: Any) -> generation_pb2.GenerateRequest:
    """`text` as the user's message, after `system` if there is one, or raw. `knobs` are build_request's."""
    if not chat:
        if system is not None:
            raise InvalidRequest("a system message needs a chat template")
        return build_request(text, **knobs)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return build_request(messages=[*messages, {"role": "user", "content": text}], **knobs)


async def run_prompt(
    client: Client,
    request: generation_pb2.GenerateRequest,
    *,
    as_json: bool = False,
    out: TextIO | None = None,
    err: TextIO | None = None,
    traceparent: str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Answer:
    """Stream the answer to `out` (stdout) as it arrives, then its summary to `err` (stderr).

    With `as_json` one JSON object goes to `out` at the end and nothing to `err`. Cancelling the task
    cancels the call. Errors of the call are raised as they are, below the text that came before.
    """
    out, err = out or sys.stdout, err or sys.stderr
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text:
            out.write(text)
            out.flush()
            last = text

    try:
        answer = await receive(
            client, request, on_text=_ignore if as_json else show, traceparent=traceparent, clock=clock
        )
    finally:
        if last and not last.endswith("\n"):
            out.write("\n")
            out.flush()
    if as_json:
        print(json.dumps(answer.as_json(), ensure_ascii=False), file=out)
    else:
        print(summary_line(answer), file=err)
    return answer


def summary_line(answer: Answer) -> str:
    """tokens, tokens/s, TTFT, passes, drafted, accepted, tokens per pass, how it ended, trace."""
    usage, timeline = answer.finished.usage, answer.timeline
    tokens = len(answer.token_ids)
    parts = [
        f"{tokens} {'token' if tokens == 1 else 'tokens'} in {timeline.seconds:.2f} s"
        f" ({_figure(answer.tokens_per_s, 1)} tokens/s"
        f", TTFT {'-' if timeline.ttft is None else f'{timeline.ttft * 1000:.0f}'} ms)",
        f"{usage.passes} passes",
        f"{usage.drafted} drafted",
        f"{usage.accepted} accepted" + (f" ({usage.accepted / usage.drafted:.0%})" if usage.drafted else ""),
        f"{_figure(answer.tokens_per_pass, 2)} tokens/pass",
        answer.finish_reason + ("" if answer.stop_cause is None else f" ({_cause(answer.stop_cause)})"),
    ]
    if answer.finished.not_exact:
        parts.append("not exact: moved to a worker of other numerics")
    trace = answer.started.trace_id
    parts.append(f"trace {trace}" if trace else "no trace (start the services with OTEL_EXPORTER_OTLP_ENDPOINT set)")
    return " | ".join(parts)


def _cause(cause: dict[str, Any]) -> str:
    (kind, value), *_ = cause.items()
    return f"{kind} {value!r}"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ignore(text: str) -> None:
    pass
