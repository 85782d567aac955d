"""A model's chat template: messages in, the prompt's text out, as transformers renders it.

Templates come with the model and are run in jinja's sandbox. This does not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.core.errors import InvalidRequest, ModelRefused


class ChatTemplate:
    """Compiled once, at start."""

    __slots__ = ("_template", "_tokens")

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are bos_token, eos_token and the like. Raises ModelRefused for a template that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelRefused(f"the model's chat template does not compile: {error}") from error

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """Ends where the assistant's answer begins. Raises InvalidRequest with the template's own message."""
        if not messages:
            raise InvalidRequest("chat.messages is empty; it needs at least 1 message")
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(
                messages=chat, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program: it may divide by zero
            raise InvalidRequest(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error


class _Generation(Extension):
    """{% generation %} marks the assistant's part for training; for a prompt its body is plain template."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own, without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
