"""Chat templates: a list of messages becomes one prompt, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template refuses these messages (for example roles that do not alternate), in its own words."""


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _to_json(value: object, indent: int | None = None, **_ignored: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class ChatTemplate:
    """A compiled template. The conventions (trim_blocks, raise_exception, tojson, strftime_now) are Hugging Face's."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special = dict(special_tokens)
        self._template = environment.from_string(source)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, open for the assistant's turn. ChatTemplateError when the template does not take the messages."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the model's chat template fails on these messages: {error}") from None
        except TypeError as error:  # a message without a field that the template joins
            raise ChatTemplateError(f"the model's chat template does not take these messages: {error}") from None
