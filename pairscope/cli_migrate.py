"""`pairscope migrate`: running requests go on in another engine, with what it took; or how long it must take, by arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from engine.migration.estimate import Shape, estimate, tokens_within
from engine.migration.obstacle import reason_of
from pairscope.config import gather
from pairscope.options import SPOKEN, ConfigOption, LangOption, Refused, one_line_for_mistakes, overrides
from telemetry.lineprotocol import printable
from telemetry.messages import say

ANSWER_LIMIT = 1 << 22
PATIENCE_S = 600.0
"""A migration ends by the source's own migrate_timeout_s; this is for a source that is gone."""

ANSWERS_WITHIN_S = 30.0
OBSTACLES = ("unreachable", "token", "no_engine", "differs", "not_now")

Outcome = dict[str, Any]


def m(key: str) -> str:
    return say(f"migrate.about.{key}", SPOKEN)


def migrate_command(
    source: Annotated[str | None, typer.Argument(metavar="[SOURCE]", help=m("source"))] = None,
    target: Annotated[str | None, typer.Argument(metavar="[TARGET]", help=m("target"))] = None,
    request: Annotated[str | None, typer.Option("--request", metavar="ID", help=m("request"))] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", metavar="FILE", help=m("token_file"))] = None,
    link: Annotated[bool, typer.Option("--link-test/--no-link-test", help=m("link"))] = True,
    only_estimate: Annotated[bool, typer.Option("--estimate", help=m("estimate"))] = False,
    shape: Annotated[str | None, typer.Option("--shape", metavar="LxHxD", help=m("shape"))] = None,
    number_bytes: Annotated[int, typer.Option("--number-bytes", min=1, max=8, help=m("number_bytes"))] = 2,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=1 << 30, help=m("tokens"))] = 4096,
    gbit: Annotated[float, typer.Option("--link", min=1e-6, max=1e6, metavar="GBIT", help=m("gbit"))] = 10.0,
    within_ms: Annotated[float | None, typer.Option("--within", min=1e-3, max=1e9, help=m("within"))] = None,
    as_json: Annotated[bool, typer.Option("--json", help=m("json"))] = False,
    config: ConfigOption = None,
    lang: LangOption = None,
) -> None:
    with one_line_for_mistakes():
        language = gather(config, overrides(state_dir=None, store=None, lang=lang), lang).language
        with _client(token_file, language) as http:
            if only_estimate:
                per_token = _bytes_per_token(http, source, shape, number_bytes, language)
                _print_estimate(per_token, tokens, gbit, within_ms, as_json, language)
                return
            if source is None or target is None:
                raise Refused(say("migrate.mistake.addresses", language))
            source, target = _address(source, language), _address(target, language)
            if source == target:
                raise Refused(say("migrate.mistake.same", language))
            ids = [request] if request else [str(r["id"]) for r in _runs(http, source, language)["requests"]]
            _refuse_target(http, source, target, language)
            done = list(_moved(http, source, target, ids, link, as_json, language))
        if as_json:
            print(json.dumps(done, ensure_ascii=False, indent=1))
        elif not done:
            print(say("migrate.told.nothing", language, url=source))
        raise typer.Exit(0 if done and not any("error" in outcome for outcome in done) else 1)


def _client(token_file: Path | None, language: str) -> httpx.Client:
    headers = {}
    if token_file is not None:
        try:
            headers = {"Authorization": f"Bearer {token_file.read_text('utf-8').strip()}"}
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise Refused(say("migrate.mistake.token_file", language, path=token_file, reason=reason)) from None
    return httpx.Client(headers=headers, timeout=httpx.Timeout(PATIENCE_S, connect=5.0), trust_env=False)


def _address(text: str, language: str) -> str:
    """The base address of an engine, without its last slash."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or parts.username or parts.query or parts.fragment:
        shown = printable(re.sub(r"//[^/@]*@", "//...@", text))  # a password isn't printed again
        raise Refused(say("migrate.mistake.address", language, text=shown))
    return text.rstrip("/")


def _runs(http: httpx.Client, url: str, language: str) -> Mapping[str, Any]:
    """What runs at an engine, and what its cache is made of."""
    try:
        answer = http.get(f"{url}/kv/requests", timeout=ANSWERS_WITHIN_S)
        _refuse_error(answer, url, language)
        told = answer.json()
        return {"requests": list(told["requests"]), "bytes_per_token": float(told["bytes_per_token"])}
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise Refused(_unreachable(url, error, language)) from None
    except (ValueError, KeyError, TypeError):
        raise Refused(say("migrate.mistake.no_engine", language, url=printable(url))) from None


def _refuse_target(http: httpx.Client, source: str, target: str, language: str) -> None:
    """Refused when the source finds that its requests can't go on at the target."""
    try:
        answer = http.post(f"{source}/kv/target", json={"target": target}, timeout=ANSWERS_WITHIN_S)
        _refuse_error(answer, source, language)
        found = answer.json()["obstacle"]
        if found is None:
            return
        kind, reason = str(found["kind"]), printable(str(found["reason"]))
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise Refused(_unreachable(source, error, language)) from None
    except (ValueError, KeyError, TypeError):
        raise Refused(say("migrate.mistake.no_engine", language, url=printable(source))) from None
    key = kind if kind in OBSTACLES else "not_now"
    raise Refused(say(f"migrate.obstacle.{key}", language, target=printable(target), reason=reason))


def _unreachable(url: str, error: Exception, language: str) -> str:
    reason = printable(reason_of(error))
    return say("migrate.mistake.unreachable", language, url=printable(url), reason=reason)


def _refuse_error(answer: httpx.Response, url: str, language: str) -> None:
    """Refused with what an engine says against it, and what to do; or that this is no engine at all."""
    if answer.status_code == 200:
        return
    try:
        reason = str(json.loads(answer.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        raise Refused(say("migrate.mistake.no_engine", language, url=printable(url))) from None
    key = {401: "token", 403: "forbidden"}.get(answer.status_code, "answer")
    told = {"url": printable(url), "code": answer.status_code, "reason": printable(reason)}
    raise Refused(say(f"migrate.mistake.{key}", language, **told))


def _moved(
    http: httpx.Client, source: str, target: str, ids: list[str], link: bool, as_json: bool, language: str
) -> Iterator[Outcome]:
    """Move one after another, each shown while it moves and told when it has."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        for number, id in enumerate(ids, 1):
            named = say("migrate.told.moving", language, request=id, number=number, count=len(ids))
            bar = progress.add_task(printable(named), total=None)

            def show(sent: float, of: float, bar: Any = bar) -> None:
                progress.update(bar, completed=sent, total=of)

            outcome = _move(http, source, {"target": target, "request": id, "link": link}, show, language)
            progress.remove_task(bar)
            if not as_json:
                print(_told(outcome, language), flush=True)
            yield outcome


def _move(
    http: httpx.Client, source: str, order: Mapping[str, object], show: Callable[[float, float], None], language: str
) -> Outcome:
    last: Outcome = {}
    try:
        with http.stream("POST", f"{source}/kv/migrate", json=order) as answer:
            _refuse_error(answer, source, language)
            for line in answer.iter_lines():
                last = json.loads(line[:ANSWER_LIMIT])
                if "sent_bytes" in last:
                    show(last["sent_bytes"], last["of_bytes"])
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        raise Refused(_unreachable(source, error, language)) from None
    except (ValueError, KeyError, TypeError):
        last = {}
    return _outcome(str(order["request"]), last)


def _outcome(request: str, last: Outcome) -> Outcome:
    """What came of it, with rates in bytes/s; `expected_s` is what the cache takes at the link's rate."""
    done = last.get("migrated")
    if not isinstance(done, dict):
        return {"request": request, "error": str(last.get("error", "?")), "resumed": last.get("resumed")}
    outcome = {**done, "bandwidth_bytes_s": done["bytes"] / done["sending_s"] if done["sending_s"] else None}
    if last.get("link_s"):
        rate = done["bytes"] / last["link_s"]
        outcome |= {"link_bytes_s": rate, "expected_s": done["bytes"] / rate}
    elif "link_error" in last:
        outcome["link_error"] = last["link_error"]
    return outcome


def _told(outcome: Outcome, language: str) -> str:
    request = printable(str(outcome["request"]))
    if "error" in outcome:
        return say("migrate.told.failed", language, request=request, reason=printable(outcome["error"]))
    rate = (outcome["bandwidth_bytes_s"] or 0.0) / 1e6
    size = {"tokens": outcome["tokens"], "mb": outcome["bytes"] / 1e6, "ms": 1000 * outcome["seconds"]}
    lines = [say("migrate.told.moved", language, request=request, rate=rate, **size)]
    if "link_bytes_s" in outcome:
        given = outcome["link_bytes_s"] / 1e6
        share = {"link": given, "pct": 100 * rate / given, "ms": 1000 * outcome["expected_s"]}
        lines.append(say("migrate.told.of_link", language, **share))
    elif "link_error" in outcome:
        lines.append(say("migrate.told.no_link", language, reason=printable(str(outcome["link_error"]))))
    return "\n".join(lines)


def _bytes_per_token(
    http: httpx.Client, source: str | None, shape: str | None, number_bytes: int, language: str
) -> float:
    if shape is None:
        if source is None:
            raise Refused(say("migrate.mistake.no_shape", language))
        return float(_runs(http, _address(source, language), language)["bytes_per_token"])
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([1-9]\d{0,4})", shape)
    if not match:
        raise Refused(say("migrate.mistake.shape", language, text=printable(shape)))
    layers, kv_heads, head_dim = (int(part) for part in match.groups())
    return Shape(layers, kv_heads, head_dim, number_bytes).bytes_per_token


def _print_estimate(
    per_token: float, tokens: int, gbit: float, within_ms: float | None, as_json: bool, language: str
) -> None:
    rate = gbit * 1e9 / 8
    found = estimate(per_token, tokens, rate)
    fitting = None if within_ms is None else tokens_within(per_token, within_ms / 1000, rate)
    needed = None if within_ms is None else found.rate_within(within_ms / 1000) * 8 / 1e9
    if as_json:
        told: dict[str, object] = {
            "tokens": tokens,
            "bytes": found.bytes,
            "link_gbit_s": gbit,
            "seconds": found.seconds,
        }
        if within_ms is not None:
            told |= {"within_ms": within_ms, "tokens_within": fitting, "needed_gbit_s": needed}
        print(json.dumps(told, indent=1))
        return
    size = {"tokens": tokens, "per_token": per_token, "mb": found.bytes / 1e6, "gbit": gbit, "ms": 1000 * found.seconds}
    print(say("migrate.told.estimate", language, **size))
    if within_ms is not None:
        print(say("migrate.told.within", language, ms=within_ms, fitting=fitting, tokens=tokens, needed=needed))
