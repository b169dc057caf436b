"""A real ipmi_sim on loopback: a BMC whose sensors follow files that the test writes. It has no DCMI."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.doubles.ipmi.sensors import Analog, Discrete

USER, PASSWORD = "watcher", "fan-secret-7"
POLL_MS = 100


class IpmiSimulator:
    """`values` maps a sensor's name to its raw byte, or to its states as bits."""

    def __init__(
        self, folder: Path, port: int, sensors: Sequence[Analog | Discrete], values: Mapping[str, int]
    ) -> None:
        self.port = port
        self._folder = folder
        self._sensors = {sensor.name: sensor for sensor in sensors}
        (folder / "state").mkdir(parents=True)
        for name in self._sensors:
            self.set(name, values[name])
        (folder / "lan.conf").write_text(self._lan())
        (folder / "commands").write_text("\n".join(self._commands()) + "\n")
        self._process = subprocess.Popen(
            [
                "ipmi_sim",
                "-n",
                "-c",
                str(folder / "lan.conf"),
                "-f",
                str(folder / "commands"),
                "-s",
                str(folder / "state"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=(folder / "log").open("wb"),
            stderr=subprocess.STDOUT,
        )

    def set(self, name: str, value: int) -> None:
        """Followed within some tenths of a second."""
        new = self._folder / "new"
        new.write_text(f"{value}\n")
        new.replace(self._file(name))

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _file(self, name: str) -> Path:
        return self._folder / f"sensor-{self._sensors[name].number}"

    def _lan(self) -> str:
        auths = "\n".join(
            f"  allowed_auths_{level} none md2 md5 straight" for level in ("callback", "user", "operator", "admin")
        )
        return (
            'name "double"\nset_working_mc 0x20\n'
            f"startlan 1\n  addr 127.0.0.1 {self.port}\n  priv_limit admin\n{auths}\n"
            "  guid a123456789abcdefa123456789abcdef\nendlan\n"
            'user 1 true "" "" user 10 none md2 md5 straight\n'
            f'user 2 true "{USER}" "{PASSWORD}" admin 10 none md2 md5 straight\n'
        )

    def _commands(self) -> Sequence[str]:
        lines = ["mc_setbmc 0x20", "mc_add 0x20 0 no-device-sdrs 0x23 9 8 0x9f 0x1291 0xf02"]
        nothing = "0" * 15
        for sensor in self._sensors.values():
            number = sensor.number
            lines += [
                f'sensor_add 0x20 0 {number} {sensor.kind} {sensor.reading_type} poll {POLL_MS} file "{self._file(sensor.name)}"',
                f"sensor_set_event_support 0x20 0 {number} enable scanning none {nothing} {nothing} {nothing} {nothing}",
                f"main_sdr_add 0x20 {' '.join(f'0x{byte:02x}' for byte in sensor.record())}",
            ]
        return [*lines, "mc_enable 0x20"]
