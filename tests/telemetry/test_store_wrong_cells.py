"""An answer of the right shape whose cells are of the wrong kind is a StoreError, never an exception of the reader."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from telemetry.store import StoreError, open_store
from tests.doubles.wrong_servers import Foreign

VECTOR = '{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"1"]}]}}'
SPAN = {"start_ns": 1_795_960_800 * 10**9, "end_ns": 1_795_960_860 * 10**9}


@pytest.mark.parametrize(
    "row", [[1_795_960_800 * 10**9, [7]], ["noon", 1.5], [[1], 1.5], [1_795_960_800 * 10**9, "much"]]
)
def test_cells_of_an_influxdb_that_are_of_the_wrong_kind_are_a_store_error(row: list[object]) -> None:
    series = {"name": "host", "tags": {"node": "n1"}, "columns": ["time", "load1"], "values": [row]}
    text = json.dumps({"results": [{"series": [series]}]})
    headers = {"X-Influxdb-Version": "1.8.10", "X-Influxdb-Build": "OSS"}
    server = Foreign(lambda path: (204, "") if path.startswith("/ping") else (200, text), headers=headers)
    with closing(server), closing(open_store(f"influxdb://127.0.0.1:{server.server_port}/fleet")) as store:
        with pytest.raises(StoreError):
            store.samples("host", **SPAN)
        with pytest.raises(StoreError):
            store.range("host", ["load1"], **SPAN, step_ns=10**9)
        with pytest.raises(ValueError, match="unknown measurement"):  # what the caller did wrong stays the caller's
            store.samples("nothing", **SPAN)


@pytest.mark.parametrize("value", [[7], "much", {"a": 1}])
def test_values_of_a_victoriametrics_that_are_of_the_wrong_kind_are_a_store_error(value: object) -> None:
    labels = {"__name__": "host_load1", "db": "", "node": "n1"}
    line = json.dumps({"metric": labels, "values": [value], "timestamps": [1_795_960_800_000]}, separators=(",", ":"))

    def answer(path: str) -> tuple[int, str]:
        return (200, line) if path.startswith("/api/v1/export") else (200, VECTOR)

    server = Foreign(answer)
    with closing(server), closing(open_store(f"victoriametrics://127.0.0.1:{server.server_port}")) as store:
        with pytest.raises(StoreError, match="wrong kind"):
            store.samples("host", **SPAN)
        with pytest.raises(ValueError, match="unknown measurement"):
            store.samples("nothing", **SPAN)
