"""The plan of `pairscope up`: which parts run, with which settings, on which ports. It starts nothing."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

from agent.settings import AgentSettings
from agent.simulator.settings import SimulatorSettings
from dashboard.settings import DashboardSettings
from engine.checkpoints.find import ModelNotFound, find_model
from engine.settings import EngineSettings
from pairscope import __version__
from pairscope.config import ConfigError, Configuration, settings
from pairscope.parts import PartSpec
from pairscope.up import HostedEngine, Plan
from telemetry.messages import say

ENGINE_NAME = "default"


def plan_up(
    configuration: Configuration,
    *,
    host_engine: bool,
    send_traffic: bool,
    simulate: tuple[int, int] | None,
    fault: str | None,
) -> Plan:
    """Everything on this machine. Engines that the configuration names are watched or hosted as it says; with none named,
    and `host_engine`, PairScope's own engine is hosted. ConfigError for unusable settings.
    """
    common = {"store_url": configuration.store_url, "state_dir": configuration.state_dir}
    engine = settings(configuration, "engine", EngineSettings)
    dashboard = settings(configuration, "dashboard", DashboardSettings, **common, language=configuration.language)
    sections: dict[str, Any] = {name: dict(table) for name, table in configuration.sections.items()}
    dashboard_url = f"http://{dashboard.host}:{dashboard.port}"
    engine_url = f"http://{engine.host}:{engine.port}"
    hosted = host_engine and not sections["agent"].get("engines")
    effective = configuration.state_dir / "up.json"
    if hosted:
        try:
            find_model(engine.model)
        except ModelNotFound as error:
            raise ConfigError(say(error.key, configuration.language, **error.values)) from None
        command = [*_pairscope(), "engine", "--config", str(effective)]
        sections["agent"]["engines"] = [
            {"name": ENGINE_NAME, "url": engine_url, "kind": "pairscope", "command": command}
        ]
    watched = replace(configuration, sections=sections)
    agent = settings(watched, "agent", AgentSettings, **common, node=configuration.node, **configuration.place)
    agent_url = f"http://{agent.host}:{agent.port}"
    if hosted:
        sections["traffic"].setdefault("url", engine_url)
    sections["triage"].setdefault("external_url", dashboard_url)  # what the links in an alert open
    document = {
        "state_dir": str(configuration.state_dir),
        "store": configuration.store_url,
        "language": configuration.language,
        **sections,
    }
    specs = {
        "agent": ["agent"],
        "triage": ["triage", "--serve"],
        "dashboard": ["dashboard"],
    }
    size = f"{simulate[0]}x{simulate[1]}" if simulate else ""
    if simulate:
        nodes, gpus = simulate
        settings(
            configuration, "simulator", SimulatorSettings, **common, nodes=nodes, gpus_per_node=gpus, fault=fault
        )  # a mistake shows now, not in a log
        specs["simulator"] = ["simulate", size, *(["--fault", fault] if fault else [])]
    if hosted and send_traffic:
        specs["traffic"] = ["traffic"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAIRSCOPE_")}
    ports = {"dashboard": (dashboard.host, dashboard.port), "agent": (agent.host, agent.port)}
    if hosted:
        ports["engine"] = (engine.host, engine.port)
    return Plan(
        parts=[
            PartSpec(
                name,
                [*_pairscope(), *arguments, "--config", str(effective)],
                environment,
                configuration.state_dir / "log" / f"{name}.log",
            )
            for name, arguments in specs.items()
        ],
        addresses={"agent": f"{agent_url}/metrics", "dashboard": dashboard_url},
        ports=ports,
        state_dir=configuration.state_dir,
        effective=json.dumps(document, ensure_ascii=False, indent=1),
        open_url=dashboard_url,
        engine=HostedEngine(ENGINE_NAME, engine_url) if hosted else None,
        simulated=size,
        language=configuration.language,
        version=__version__,
    )


def _pairscope() -> list[str]:
    return [sys.executable, "-m", "pairscope"]
