"""The configuration: who wins, and that a mistake costs one clear line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pairscope.config import ConfigError, gather, redacted, settings


@dataclass(frozen=True, slots=True)
class Inner:
    name: str
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    store_url: str
    port: int = 1
    interval_s: float = 1.0
    webhook_url: str | None = None
    engines: tuple[Inner, ...] = ()


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAIRSCOPE_LANG", "en")
    monkeypatch.setenv("PAIRSCOPE_STATE_DIR", str(tmp_path))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pairscope.toml"
    path.write_text(text)
    return path


def test_command_line_beats_environment_beats_file_beats_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[agent]\nport = 2\ninterval_s = 2\n")
    assert settings(gather(path, {}), "agent", Part, store_url="s") == Part("s", 2, 2.0)
    monkeypatch.setenv("PAIRSCOPE_AGENT__PORT", "3")
    assert settings(gather(path, {}), "agent", Part, store_url="s").port == 3
    assert settings(gather(path, {"agent": {"port": 4}}), "agent", Part, store_url="s") == Part("s", 4, 2.0)
    assert settings(gather(None, {"agent": {"port": None}}), "agent", Part, store_url="s").port == 3


def test_the_store_follows_the_state_folder(tmp_path: Path) -> None:
    assert gather(None, {}).store_url == f"sqlite://{tmp_path}/store.db"
    assert gather(None, {"store": "influxdb://h:8086/d"}).store_url == "influxdb://h:8086/d"


def test_tables_inside_a_section_become_their_dataclass(tmp_path: Path) -> None:
    path = write(tmp_path, '[[agent.engines]]\nname = "a"\ngpus = "0+1"\n')
    assert settings(gather(path, {}), "agent", Part, store_url="s").engines == (Inner("a", "0+1"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[agent]\nprot = 2\n", "[agent]: unknown key 'prot'. Did you mean port?"),
        ("[agnet]\nport = 2\n", "unknown key 'agnet'. Did you mean agent?"),
        ('[agent]\nport = "many"\n', "[agent] port: Input should be a valid integer"),
        ('[agent]\nengines = [{name = "a", gpu = "0"}]\n', "[agent.engines]: unknown key 'gpu'. Did you mean gpus?"),
        ("[agent\n", "pairscope.toml: "),
        ("agent = 3\n", "agent must be a table"),
        ('language = "fr"\n', "language 'fr' is not known"),
        ("[agent]\nwebhook_url_file = '/nonexistent'\n", "[agent] webhook_url_file: /nonexistent can't be read"),
        ('[agent]\nwebhook_url_file = "/a\\u0000b"\n', "agent.webhook_url_file: a NUL"),
        ("[agent]\nwebhook_url_file = '/dev/zero'\n", "[agent] webhook_url_file: /dev/zero can't be read: > 64 KiB"),
        ("[agent]\nwebhook_url_file = '/'\n", "can't be read: Is a directory"),
        ('store = "sqlite:///a\\u0000b"\n', "store: a NUL"),
        ('[agent]\nengines = [{name = "a\\u0000b"}]\n', "agent.engines.0.name: a NUL"),
        ('[node]\nname = "a\\nb"\n', "[node] name: use a text of at most 255 characters"),
        (f'[node]\nrack = "{"r" * 256}"\n', "[node] rack: use a text of at most 255 characters"),
        ("[node]\nname = [1]\n", "[node] name: use a text"),
        (f"a = {'[' * 5000}{']' * 5000}\n", "pairscope.toml: "),
        (f"a = {'{a = ' * 5000}1{'}' * 5000}\n", "pairscope.toml: "),
        (f"port = {'9' * 5000}\n", "pairscope.toml: "),
        ("#" * ((1 << 20) + 1), "pairscope.toml: > 1024 KiB"),
    ],
)
def test_a_mistake_costs_one_line_that_names_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        settings(gather(path, {}), "agent", Part, store_url="s")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("deep.json", b"[" * 100_000 + b"]" * 100_000),
        ("deeper.json", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        ("half.json", b'{"node": {"name": "\\ud800"}}'),
        ("binary.toml", bytes(range(256))),
        ("folder.toml", None),
    ],
)
def test_no_file_however_odd_costs_more_than_a_line(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        gather(path, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["a" + ".b" * 100_000 + " = 1\n", "[a" + ' . "b"' * 100_000 + "]\n", "x = { y" + ".z" * 100_000 + " = 1 }\n"],
    ids=["bare", "table", "inline"],
)
def test_a_key_of_a_hundred_thousand_parts_is_not_read(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tomllib.loads", lambda _text: pytest.fail("it would take half a minute"))
    with pytest.raises(ConfigError, match="a key of 200 parts or more") as told:
        gather(write(tmp_path, text), {})
    assert "\n" not in str(told.value) and len(str(told.value)) < 500


def test_words_with_dots_are_no_endless_key(tmp_path: Path) -> None:
    words = "to be continued" + " ..." * 300 + " 10.0.0.1" * 300 + "a" * 100_000
    (engine,) = settings(
        gather(write(tmp_path, f'[agent]\nengines = [{{ name = "{words}" }}]\n'), {}), "agent", Part, store_url="x"
    ).engines
    assert engine.name == words


@pytest.mark.parametrize(("language", "words"), [("en", "choose another folder"), ("zh", "请另选目录")])
def test_a_state_folder_in_which_no_embedded_store_can_lie_is_told_with_what_helps(
    tmp_path: Path, language: str, words: str
) -> None:
    asked = {"state_dir": str(tmp_path / "what?"), "language": language}
    with pytest.raises(ConfigError, match=words) as told:
        gather(None, asked, language)
    assert "what?" in str(told.value)
    assert gather(None, {**asked, "store": "influxdb://db/fleet"}, language).state_dir.name == "what?"


def test_a_file_without_end_is_read_to_its_limit_only() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: > 1024 KiB"):
        gather(Path("/dev/zero"), {})


def test_an_environment_that_nests_without_end_costs_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAIRSCOPE_AGENT", "[" * 30_000)
    with pytest.raises(ConfigError, match="environment PAIRSCOPE_"):
        gather(None, {})


def test_a_secret_comes_from_its_file_and_is_never_shown(tmp_path: Path) -> None:
    secret = tmp_path / "hook"
    secret.write_text("https://hooks.example/abc\n")
    path = write(tmp_path, f"[agent]\nwebhook_url_file = '{secret}'\n")
    made = settings(gather(path, {}), "agent", Part, store_url="s")
    assert made.webhook_url == "https://hooks.example/abc"
    assert "abc" not in str(redacted({"webhook_url": made.webhook_url, "port": 1}))
