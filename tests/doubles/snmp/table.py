"""Run by snmpd (pass_persist): serves the OIDs of a text file, one `OID type value` a line, which is read anew at every request."""

from __future__ import annotations

import sys
from pathlib import Path

Row = tuple[tuple[int, ...], str, str]


def rows(path: Path) -> list[Row]:
    found: list[Row] = []
    for line in path.read_text("utf-8").splitlines():
        oid, kind, value = line.split(" ", 2)
        found.append((number(oid), kind, value))
    return sorted(found)


def number(oid: str) -> tuple[int, ...]:
    return tuple(int(part) for part in oid.strip(".").split("."))


def answer(row: Row | None) -> str:
    if row is None:
        return "NONE"
    oid, kind, value = row
    return f".{'.'.join(map(str, oid))}\n{kind}\n{value}"


def main(path: Path) -> None:
    while command := sys.stdin.readline().strip():
        if command == "PING":
            reply = "PONG"
        else:
            asked = number(sys.stdin.readline())
            table = rows(path)
            if command == "get":
                reply = answer(next((row for row in table if row[0] == asked), None))
            else:
                reply = answer(next((row for row in table if row[0] > asked), None))
        print(reply, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
