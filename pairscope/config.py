"""The one configuration: gathered from command line, environment and file, checked, and handed down to the parts' own settings.

Precedence: command line, then environment (PAIRSCOPE_SECTION__KEY), then file (TOML or JSON), then each part's defaults.
A key `x_file` names a file that holds the value of `x`, so that no secret need stand in the configuration itself.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import socket
import tomllib
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from telemetry.lineprotocol import printable
from telemetry.messages import LANGUAGES, say, terminal_language

Settings = TypeVar("Settings")
Section = dict[str, Any]

SECTIONS = ("node", "agent", "engine", "triage", "dashboard", "traffic", "simulator", "report")
TOP_LEVEL = ("state_dir", "store", "language", *SECTIONS)
NODE_KEYS = ("name", "rack", "circuit", "cluster")
SECRET_KEYS = (
    *("webhook_url", "webhook_secret", "token", "migrate_token", "password", "store"),
    *("api_key", "community", "auth_password", "privacy_password"),
)
FILE_LIMIT_BYTES = 1 << 20
SECRET_FILE_LIMIT_BYTES = 65536
KEY_PARTS = 200
_ENDLESS_KEY = re.compile(rf"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){{{KEY_PARTS}}}""")
NAME_LIMIT = 255
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")
"""Neither a path, an argument nor an address can hold these."""


class ConfigError(Exception):
    """A user's mistake in the configuration. The message is one line: where it stands, what is wrong, and the remedy."""


class _Environment(BaseSettings):
    """What the environment says; pydantic-settings does the nesting (PAIRSCOPE_NODE__RACK)."""

    model_config = SettingsConfigDict(env_prefix="PAIRSCOPE_", env_nested_delimiter="__", extra="ignore")

    state_dir: str | None = None
    store: str | None = None
    language: str | None = None
    node: Section = {}
    agent: Section = {}
    engine: Section = {}
    triage: Section = {}
    dashboard: Section = {}
    traffic: Section = {}
    simulator: Section = {}
    report: Section = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (env_settings,)


@dataclass(frozen=True, slots=True)
class Configuration:
    """What was gathered. `sections` are still plain; `settings` turns one into its part's dataclass."""

    state_dir: Path
    store_url: str
    language: str
    sections: Mapping[str, Section] = field(default_factory=dict)

    def moved_to(self, state_dir: Path) -> Configuration:
        """The same in another state folder; a store that stood in the old one stands in the new one."""
        inside = self.store_url == embedded_store(self.state_dir)
        return replace(self, state_dir=state_dir, store_url=embedded_store(state_dir) if inside else self.store_url)

    @property
    def node(self) -> str:
        return str(self.sections["node"].get("name") or socket.gethostname())

    @property
    def place(self) -> dict[str, str]:
        """rack, circuit and cluster, where given."""
        return {key: str(self.sections["node"][key]) for key in NODE_KEYS[1:] if self.sections["node"].get(key)}


def gather(path: Path | None, overrides: Mapping[str, Any], language: str | None = None) -> Configuration:
    """Read and merge all sources. `overrides` has the shape of the file and wins. ConfigError for anything unusable."""
    spoken = language or terminal_language()
    merged: dict[str, Any] = {}
    for source in (_read_file(path, spoken) if path else {}, _environment(spoken), overrides):
        for key, value in source.items():
            if value is None:
                continue
            if isinstance(value, Mapping):
                merged[key] = {**merged.get(key, {}), **{k: v for k, v in value.items() if v is not None}}
            else:
                merged[key] = value
    where = str(path) if path else say("pairscope.config.here", spoken)
    _refuse_unknown(merged, TOP_LEVEL, where, spoken)
    for section in SECTIONS:
        if not isinstance(merged.setdefault(section, {}), dict):
            raise ConfigError(say("pairscope.config.not_a_table", spoken, where=where, key=section))
    _refuse_unknown(merged["node"], NODE_KEYS, f"{where} [node]", spoken)
    _refuse_unusable_texts(merged, "", spoken)
    _refuse_unusable_names(merged["node"], spoken)
    chosen = str(merged.get("language") or spoken)
    if chosen not in LANGUAGES:
        raise ConfigError(say("pairscope.config.language", spoken, where=where, value=chosen))
    state_dir = Path(str(merged.get("state_dir") or default_state_dir())).expanduser().absolute()
    if not merged.get("store") and "?" in str(state_dir):
        raise ConfigError(say("pairscope.config.question_mark", spoken, path=state_dir))
    store_url = str(merged.get("store") or embedded_store(state_dir))
    return Configuration(state_dir, store_url, chosen, {section: dict(merged[section]) for section in SECTIONS})


def embedded_store(state_dir: Path) -> str:
    return f"sqlite://{state_dir / 'store.db'}"


def default_state_dir() -> Path:
    """systemd's StateDirectory, else the user's state folder (XDG)."""
    given = os.environ.get("STATE_DIRECTORY")
    if given:
        return Path(given.split(":", 1)[0])
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pairscope"


def settings(configuration: Configuration, section: str, kind: type[Settings], **given: object) -> Settings:
    """The part's settings dataclass from its section; `given` are the shared values, which the section can't set.

    ConfigError names an unknown key with its nearest match, or a value of the wrong type.
    """
    spoken = configuration.language
    raw = dict(configuration.sections[section])
    names = [f.name for f in dataclasses.fields(kind) if f.name not in given]  # type: ignore[arg-type]
    _take_secrets(raw, names, f"[{section}]", spoken)
    _refuse_unknown(raw, names, f"[{section}]", spoken)
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    for key, value in raw.items():
        # a table inside a section (an engine of [[agent.engines]]): the same secrets, the same check of its keys
        for inner in _dataclasses_in(hints[key]):
            where = f"[{section}.{key}]"
            inner_names = [f.name for f in dataclasses.fields(inner)]
            items = [dict(item) if isinstance(item, Mapping) else item for item in _listed(value)]
            for item in items:
                if isinstance(item, dict):
                    _take_secrets(item, inner_names, where, spoken)
                    _refuse_unknown(item, inner_names, where, spoken)
            raw[key] = items if isinstance(value, list | tuple) else items[0]
    try:
        return TypeAdapter(kind).validate_python({**raw, **{k: v for k, v in given.items() if k in known}})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            say(
                "pairscope.config.value",
                spoken,
                where=f"[{section}] {key}".strip(),
                reason=first["msg"].removeprefix("Value error, "),
            )
        ) from None
    except ValueError as error:
        raise ConfigError(say("pairscope.config.value", spoken, where=f"[{section}]", reason=error)) from None


def redacted(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section as it may be shown: secrets are replaced by stars, in its tables too."""
    return {key: "***" if key in SECRET_KEYS and value else _redacted_value(value) for key, value in section.items()}


def private_files(path: Path | None, configuration: Configuration) -> list[Path]:
    """The files that only their owner should read: those that hold secrets, and the configuration file when it does itself."""
    found = [Path(value) for section in configuration.sections.values() for value in _secret_paths(section)]
    holds_secrets = any(redacted(section) != section for section in configuration.sections.values())
    return [*([path] if path and holds_secrets else []), *found]


def _secret_paths(value: object) -> Iterator[str]:
    """The values of all keys such as `password_file`, in tables within tables too."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(inner, str) and key.removesuffix("_file") in SECRET_KEYS and key.endswith("_file"):
                yield inner
            else:
                yield from _secret_paths(inner)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_paths(item)


def _redacted_value(value: object) -> object:
    if isinstance(value, Mapping):
        return redacted(value)
    return [_redacted_value(item) for item in value] if isinstance(value, list | tuple) else value


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dataclasses_in(hint: object) -> list[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [found for inner in typing.get_args(hint) for found in _dataclasses_in(inner)]


def _environment(language: str) -> dict[str, Any]:
    try:
        return _Environment().model_dump(exclude_defaults=True)
    except (ValueError, ValidationError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(say("pairscope.config.environment", language, reason=reason)) from None


def _read_file(path: Path, language: str) -> dict[str, Any]:
    try:
        text = _read_bounded(path, FILE_LIMIT_BYTES)
        loaded = json.loads(text) if path.suffix == ".json" else _toml(text, language)
    except OSError as error:
        raise ConfigError(say("pairscope.config.unreadable", language, path=path, reason=error.strerror)) from None
    except UnicodeDecodeError:
        raise ConfigError(say("pairscope.config.not_text", language, path=path)) from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and JSONDecodeError are ValueErrors
        raise ConfigError(say("pairscope.config.syntax", language, path=path, reason=error)) from None
    if not isinstance(loaded, dict):
        raise ConfigError(say("pairscope.config.not_a_table", language, where=path, key="."))
    return loaded


def _toml(text: str, language: str) -> dict[str, Any]:
    """ValueError also for a key of very many parts, on which the library's time grows with their square."""
    if _ENDLESS_KEY.search(text):
        raise ValueError(say("pairscope.config.endless_key", language, most=KEY_PARTS))
    return tomllib.loads(text)


def _take_secrets(table: Section, names: typing.Sequence[str], where: str, language: str) -> None:
    """Replace `password_file` by the `password` that stands in it, and so on for every key that has no `_file` of its own."""
    for key in list(table):
        plain = key.removesuffix("_file")
        if plain != key and key not in names and plain in names:
            table[plain] = _read_secret(Path(str(table.pop(key))), f"{where} {key}", language)


def _read_secret(path: Path, where: str, language: str) -> str:
    try:
        return _read_bounded(path, SECRET_FILE_LIMIT_BYTES).strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            say("pairscope.config.unreadable", language, path=f"{where}: {path}", reason=reason)
        ) from None


def _read_bounded(path: Path, limit_bytes: int) -> str:
    """The text of a file, a pipe or a device. OSError, or ValueError for one that is larger or no text."""
    with path.open("rb") as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise ValueError(f"> {limit_bytes >> 10} KiB")
    return content.decode("utf-8")


def _refuse_unusable_texts(value: object, where: str, language: str) -> None:
    if isinstance(value, str) and _UNUSABLE.search(value):
        reason = say("pairscope.config.unusable_text", language)
        raise ConfigError(say("pairscope.config.value", language, where=where, reason=reason))
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        _refuse_unusable_texts(inner, f"{where}.{key}".lstrip("."), language)


def _refuse_unusable_names(node: Section, language: str) -> None:
    """What becomes a tag of every sample."""
    for key, value in node.items():
        if not isinstance(value, str | int) or len(str(value)) > NAME_LIMIT or printable(str(value)) != str(value):
            reason = say("pairscope.config.name", language, limit=NAME_LIMIT)
            raise ConfigError(say("pairscope.config.value", language, where=f"[node] {key}", reason=reason))


def _refuse_unknown(table: Mapping[str, Any], known: typing.Sequence[str], where: str, language: str) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = (
                say("pairscope.config.did_you_mean", language, near=near[0])
                if near
                else say("pairscope.config.known", language, keys=", ".join(sorted(known)))
            )
            raise ConfigError(say("pairscope.config.unknown", language, where=where, key=key, hint=hint))
