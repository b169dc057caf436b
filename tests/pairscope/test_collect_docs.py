"""docs/collect.md says what is so: its configuration is accepted, and every source and question has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.sampler import COLLECTORS
from agent.settings import AgentSettings
from pairscope.cli_host import agent_settings
from pairscope.config import gather

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentSettings:
    """The settings that the TOML of the page comes to, with what it leaves to the reader filled in."""
    monkeypatch.setenv("PAIRSCOPE_STATE_DIR", str(tmp_path))
    text = "\n".join(re.findall(r"```toml\n(.*?)```", (DOCS / "collect.md").read_text("utf-8"), re.S))
    for number, path in enumerate(sorted(set(re.findall(r'"(/etc/pairscope/[^"]+)"', text)))):
        secret = tmp_path / f"secret{number}"
        secret.write_text("hunter2")
        text = text.replace(path, str(secret))
    text = text.replace('fingerprint_sha256 = "..."', f'fingerprint_sha256 = "{"ab" * 32}"')
    text = re.sub(r"^# (kind|gpus|api_key_file|probe_every_s)", r"\1", text, flags=re.M)
    config = tmp_path / "pairscope.toml"
    config.write_text(text)
    return agent_settings(gather(config, {}, "en"))


def test_the_configuration_of_the_page_is_accepted(documented: AgentSettings) -> None:
    (engine,) = documented.engines
    (pdu,) = documented.pdus
    assert (engine.api_key, engine.probe_every_s, engine.gpus) == ("hunter2", 60.0, "0+1")
    assert documented.bmc is not None
    assert (documented.bmc.password, pdu.community, pdu.rating_a) == ("hunter2", "hunter2", 30.0)


def test_every_collector_has_its_line_in_the_architecture() -> None:
    lines = re.findall(r"^\| `(\w+)` \|", (DOCS / "architecture.md").read_text("utf-8"), re.M)
    assert [name for name in COLLECTORS if name not in lines] == []
