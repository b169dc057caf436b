"""A BMC of each kind, and readers that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.power.redfish.reader import RedfishReader
from agent.settings import BmcTarget
from tests.doubles.redfish.documents import PROFILES, Documents
from tests.doubles.redfish.server import PASSWORD, USER, RedfishBmc, certificate
from tests.doubles.redfish.state import NodeState

Serve = Callable[..., RedfishBmc]
Read = Callable[..., RedfishReader]


@pytest.fixture(scope="session")
def own_certificate(tmp_path_factory: pytest.TempPathFactory, need_program: Callable[[str], str]) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), need_program("openssl"), "bmc-one")


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve("dell", node) -> a running BMC; `documents` instead of a profile's, `tls` a certificate and its key."""
    running: list[RedfishBmc] = []

    def start(
        profile: str = "both",
        node: NodeState | None = None,
        documents: Documents | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> RedfishBmc:
        made = documents if documents is not None else PROFILES[profile](node or NodeState())
        running.append(RedfishBmc(made, tls))
        return running[-1]

    yield start
    for bmc in running:
        bmc.close()


@pytest.fixture
def reader() -> Iterator[Read]:
    """reader(bmc, **settings) -> a RedfishReader for it."""
    made: list[RedfishReader] = []

    def make(bmc: RedfishBmc, **changes: object) -> RedfishReader:
        target = replace(BmcTarget(bmc.url, USER, PASSWORD), **changes)  # type: ignore[arg-type]
        made.append(RedfishReader(target))
        return made[-1]

    yield make
    for one in made:
        one.close()
