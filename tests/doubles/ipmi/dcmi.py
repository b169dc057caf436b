"""A BMC on loopback, of pyghmi, that has DCMI and no sensors: run as a program, its numbers come from a file."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

from pyghmi.ipmi.bmc import Bmc

GROUP = 0xDC
POWER_READING, POWER_LIMIT = 0x02, 0x03
INVALID_COMMAND = 0xC1


class DcmiBmc(Bmc):  # type: ignore[misc]  # the package has no types
    """`file` holds: present, lowest, highest and mean power in W, whether it is measured, the limit in W, whether it is active."""

    def __init__(self, accounts: dict[str, str], port: int, file: Path) -> None:
        super().__init__(accounts, port, address="127.0.0.1")
        self.file = file

    def handle_raw_request(self, request: dict[str, Any], session: Any) -> None:
        command, data = request["command"], request["data"]
        if request["netfn"] != 0x2C or not data or data[0] != GROUP:
            super().handle_raw_request(request, session)
            return
        now, low, high, mean, measured, limit, active = (int(word) for word in self.file.read_text().split())
        if command == POWER_READING:
            answer = struct.pack("<B4HIIB", GROUP, now, low, high, mean, 0, 1000, 0x40 if measured else 0)
            session.send_ipmi_response(data=list(answer))
        elif command == POWER_LIMIT:
            answer = struct.pack("<BHBHIHH", GROUP, 0, 0, limit, 1000, 0, 1)
            session.send_ipmi_response(data=list(answer), code=0 if active else 0x80)
        else:
            session.send_ipmi_response(code=INVALID_COMMAND)


if __name__ == "__main__":
    user, password, port, file = sys.argv[1:]
    DcmiBmc({user: password}, int(port), Path(file)).listen()
