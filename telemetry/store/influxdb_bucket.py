"""The bucket of InfluxDB 2.x and the database of 3.x over their management API: found, made, and how long it keeps.

After the references of InfluxDB OSS 2.7 (/api/v2/buckets, /api/v2/orgs) and InfluxDB 3 Core (/api/v3/configure/database).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from telemetry.store.interface import StoreError

Call = Callable[[str, str, Mapping[str, str], Mapping[str, object] | None], str]
"""The text of the answer to a method, a path, a query and a JSON body."""
NOT_FOUND = "store.failure.no_place"


class WhichOrganization(Exception):
    """None fits, or several do."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} organizations")
        self.count = count


def bucket(call: Call, name: str, org: str) -> Mapping[str, Any] | None:
    """What 2.x says of it; None when there is none that these credentials may see."""
    try:
        found = _listed(call("GET", "/api/v2/buckets", {"name": name} | ({"org": org} if org else {}), None), "buckets")
    except StoreError as error:
        if error.key != NOT_FOUND:
            raise
        return None
    return next((entry for entry in found if entry.get("name") == name), None)


def keeps_s(found: Mapping[str, Any]) -> float:
    """Seconds that a bucket keeps its samples; 0 for ever."""
    return float(
        sum(rule.get("everySeconds", 0) for rule in found.get("retentionRules") or [] if isinstance(rule, dict))
    )


def make_bucket(call: Call, name: str, org: str, keep_s: float) -> None:
    """WhichOrganization when it can't be told to which one it is to belong."""
    orgs = _listed(call("GET", "/api/v2/orgs", {"org": org} if org else {}, None), "orgs")
    if len(orgs) != 1:
        raise WhichOrganization(len(orgs))
    rules = [{"type": "expire", "everySeconds": round(keep_s)}] if keep_s else []
    call("POST", "/api/v2/buckets", {}, {"orgID": orgs[0].get("id", ""), "name": name, "retentionRules": rules})


def make_database(call: Call, name: str, keep_s: float) -> None:
    """On 3.x, where how long it keeps can't be changed afterwards."""
    wanted = {"db": name} | ({"retention_period": f"{max(1, round(keep_s / 3600))}h"} if keep_s else {})
    call("POST", "/api/v3/configure/database", {}, wanted)


def _listed(text: str, what: str) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(text)[what]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
