"""Which processes and GPUs are an engine's: real process trees and real sockets, and what is said when nobody can know."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.collectors.engine import EngineCollector
from agent.collectors.interface import GpuProcesses, Tick
from agent.engine_gpus import EngineGpus
from agent.engine_ownership import FEWER_AFTER_S, SEARCH_EVERY_S, EngineOwnership
from agent.process_table import ProcessTable
from agent.settings import EngineTarget
from telemetry.catalogue import check
from tests.doubles.proc_tree import ProcTree

DOUBLE = Path(__file__).parents[1] / "doubles" / "engine_processes.py"
HOST = ProcessTable(shows_host_pids=True)


@dataclass
class Gpus:
    """A GPU collector as far as its processes go."""

    gpu_processes: Sequence[GpuProcesses] = ()

    def run(self, **pids: Sequence[int]) -> None:
        """run(g0=[1, 2], g1=[]): the processes of GPU 0 and of GPU 1."""
        self.gpu_processes = [GpuProcesses(int(n[1:]), f"GPU-{n}", tuple(found)) for n, found in pids.items()]


class Engines:
    """Engines that are started under names, from scripts named so."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self.free_port = free_port
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        script: str = "vllm",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        workers: int = 2,
        environment: Mapping[str, str] | None = None,
        shares: bool = False,
        under: Sequence[str] = (),
    ) -> Started:
        port = port or self.free_port()
        link = self.folder / script
        if not link.exists():
            link.symlink_to(DOUBLE)
        command = [*under, sys.executable, str(link), host, str(-port if shares else port), str(workers)]
        plain = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**plain, **(environment or {})})
        self.started.append(process)
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        made = Started(port, pids["root"], pids["front"], pids["workers"], process)
        until(lambda: HOST.sockets(made.front), "a socket")
        return made

    def stop(self) -> None:
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@dataclass
class Started:
    port: int
    root: int
    front: int
    workers: list[int]
    process: subprocess.Popen[str]

    @property
    def all(self) -> set[int]:
        return {self.root, self.front, *self.workers}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        until(lambda: not any(alive(pid) for pid in self.all), "the end of all its processes")


def alive(pid: int) -> bool:
    process = HOST.process(pid)
    return process is not None and not process.is_zombie


def until(holds: Callable[[], object], what: str) -> None:
    give_up_s = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < give_up_s, f"never came: {what}"
        time.sleep(0.02)


@dataclass
class Watch:
    """Ownership at ticks that are as far apart as a test says, however fast it runs."""

    targets: list[EngineTarget]
    table: ProcessTable = HOST
    host_table: ProcessTable | None = None
    gpus: Gpus = field(default_factory=Gpus)
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.ownership = EngineOwnership(self.targets, self.table, host_table=self.host_table)
        self.ownership.sources.gpus = [self.gpus]
        self._numbers = itertools.count(1)

    def tick(self, seconds: float = 1.0) -> dict[str, EngineGpus | None]:
        """What is vouched for at this tick."""
        self.now_s += seconds
        tick = Tick(next(self._numbers), 5, self.now_s)
        self.ownership.begin(tick)
        self.ownership.settle(tick, 20.0)
        return {target.name: self.ownership.gpus(target.name) for target in self.targets}

    def search(self) -> dict[str, EngineGpus | None]:
        """A whole search, and what is vouched for after it."""
        self.ownership.look_again()
        self.tick(0.001)
        until(lambda: not self.ownership._search.busy, "the search's end")
        return self.tick(0.001)


def watch(*engines: Started, **how: object) -> Watch:
    targets = [EngineTarget(name, f"http://127.0.0.1:{e.port}") for name, e in zip("abc", engines, strict=False)]
    return Watch(targets, **how)  # type: ignore[arg-type]


@pytest.fixture
def engines(tmp_path: Path, free_port: Callable[[], int]) -> Iterator[Engines]:
    made = Engines(tmp_path, free_port)
    yield made
    made.stop()


@pytest.mark.parametrize("shares", [False, True])
def test_from_the_socket_up_to_the_root_and_down_to_the_workers(engines: Engines, shares: bool) -> None:
    engine = engines.start(shares=shares)
    seen = watch(engine)
    seen.gpus.run(g0=[engine.workers[0]], g1=[9, engine.workers[1]], g2=[8])
    assert seen.tick() == {"a": EngineGpus((0, 1), "nvml", 1.0)}
    assert seen.ownership.pid("a") == engine.root
    tree = seen.ownership._owned["a"].tree
    assert tree is not None
    assert set(tree.members) == engine.all


@pytest.mark.parametrize("host", ["::1", "0.0.0.0", "::"])
def test_a_socket_of_any_family_is_found(engines: Engines, host: str) -> None:
    engine = engines.start(host=host)
    seen = Watch([EngineTarget("a", f"http://{'[::1]' if host == '::1' else 'localhost'}:{engine.port}")])
    seen.tick()
    assert seen.ownership.pid("a") == engine.root


def test_a_parent_that_is_no_engine_by_its_name_is_not_part_of_it(engines: Engines) -> None:
    engine = engines.start(under=("sh", "-c", '"$@"; true', "vllm"))
    seen = watch(engine)
    seen.tick()
    assert seen.ownership.pid("a") == engine.root


def test_what_starts_two_engines_belongs_to_neither(engines: Engines, tmp_path: Path) -> None:
    both = tmp_path / "vllm_both"
    both.write_text(
        "import subprocess, sys\n"
        "for port in sys.argv[2:]: subprocess.Popen([sys.executable, sys.argv[1], '127.0.0.1', port, '1'])\n"
        "sys.stdin.read()\n"
    )
    (tmp_path / "vllm").symlink_to(DOUBLE)
    ports = [str(engines.free_port()) for _ in range(2)]
    parent = subprocess.Popen(
        [sys.executable, str(both), str(tmp_path / "vllm"), *ports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pids = [json.loads(parent.stdout.readline()) for _ in ports]
        until(lambda: all(HOST.sockets(said["front"]) for said in pids), "their sockets")
        seen = Watch([EngineTarget(f"p{port}", f"http://127.0.0.1:{port}") for port in ports])
        seen.search()
        assert {seen.ownership.pid(f"p{port}") for port in ports} == {said["root"] for said in pids}
    finally:
        parent.communicate("")


def test_a_gpu_that_two_engines_compute_on_is_less_sure(engines: Engines) -> None:
    one, other = engines.start(), engines.start()
    seen = watch(one, other)
    seen.gpus.run(g0=[one.workers[0], other.workers[0]], g1=[other.workers[1]])
    assert seen.tick() == {"a": EngineGpus((0,), "nvml", 0.95), "b": EngineGpus((0, 1), "nvml", 0.95)}


def test_without_the_drivers_word_the_roots_environment_tells(engines: Engines) -> None:
    ordered = engines.start(environment={"CUDA_VISIBLE_DEVICES": "3,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    unordered = engines.start(environment={"CUDA_VISIBLE_DEVICES": "1"})
    silent = engines.start()
    seen = watch(ordered, unordered, silent)
    seen.gpus.run(g0=[], g1=[], g2=[], g3=[])
    assert seen.tick() == {"a": EngineGpus((2, 3), "env", 0.6), "b": EngineGpus((1,), "env", 0.5), "c": None}
    assert [seen.ownership.tag(name) for name in "abc"] == ["2+3", "1", ""]
    seen.gpus.run(g0=[], g1=[], g2=[ordered.workers[0]], g3=[ordered.workers[1]])
    assert seen.tick()["a"] == EngineGpus((2, 3), "nvml", 1.0)


def test_the_configurations_word_stands_and_what_contradicts_it_can_be_told(engines: Engines) -> None:
    engine = engines.start()
    seen = Watch([EngineTarget("a", f"http://127.0.0.1:{engine.port}", gpus="1+0")])
    seen.gpus.run(g2=engine.workers)
    assert seen.tick() == {"a": EngineGpus((0, 1), "manual", 1.0)}
    assert seen.ownership.driver_says("a") == EngineGpus((2,), "nvml", 1.0)


def test_a_new_process_makes_the_mapping_void(engines: Engines) -> None:
    engine = engines.start()
    seen = watch(engine)
    seen.gpus.run(g1=engine.workers)
    assert seen.tick()["a"] == EngineGpus((1,), "nvml", 1.0)
    engine.end()
    seen.gpus.run(g1=[], g3=[])
    assert seen.tick()["a"] is None  # nobody vouches for it
    assert seen.ownership.tag("a") == "1"  # and it is still this GPU that has lost its engine
    again = engines.start(port=engine.port)
    assert seen.search()["a"] is None
    assert seen.ownership.tag("a") == ""
    seen.gpus.run(g1=[], g3=again.workers)
    assert seen.tick()["a"] == EngineGpus((3,), "nvml", 1.0)


def test_a_process_with_a_used_pid_is_another_process(tmp_path: Path) -> None:
    tree, gpus = contained(tmp_path)
    seen = Watch([EngineTarget("a", "http://127.0.0.1:8000")], table(tree), gpus=gpus)
    gpus.run(g1=[50])
    assert seen.tick()["a"] == EngineGpus((1,), "nvml", 1.0)
    tree.process(50, 1, arguments=("vllm", "serve"), started=777_777)
    assert seen.tick(0.001)["a"] is None


def test_a_driver_that_lists_nothing_for_a_time_changes_nothing_and_fewer_gpus_must_stand(engines: Engines) -> None:
    engine = engines.start()
    seen = watch(engine)
    both = EngineGpus((0, 1), "nvml", 1.0)
    seen.gpus.run(g0=[engine.workers[0]], g1=[engine.workers[1]])
    assert seen.tick()["a"] == both
    seen.gpus.run(g0=[], g1=[])
    assert seen.tick(100.0)["a"] == both
    seen.gpus.run(g0=[engine.workers[0]], g1=[])
    assert seen.tick()["a"] == both
    assert seen.tick(FEWER_AFTER_S - 1)["a"] == both
    assert seen.tick(2)["a"] == EngineGpus((0,), "nvml", 1.0)
    seen.gpus.run(g0=[engine.workers[0]], g1=[], g2=[engine.workers[1]])
    assert seen.tick()["a"] == EngineGpus((0, 2), "nvml", 1.0)


def test_a_search_is_made_now_and_then_and_not_at_every_tick(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(engines.start())
    searches: list[Tick] = []
    find = seen.ownership._find
    monkeypatch.setattr(seen.ownership._search, "_job", lambda tick: searches.append(tick) or find(tick))
    for _ in range(25):
        seen.tick()
        until(lambda: not seen.ownership._search.busy, "the search's end")
    assert len(searches) == 1 + 24 // SEARCH_EVERY_S


def test_processes_that_end_during_the_search_are_no_matter(engines: Engines) -> None:
    engine = engines.start()
    seen = watch(engine)
    seen.gpus.run(g1=[*engine.workers, *range(2**22 - 50, 2**22)])
    churn = subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"])
    try:
        for _ in range(10):
            assert seen.search()["a"] == EngineGpus((1,), "nvml", 1.0)
    finally:
        churn.kill()
        churn.wait()


def test_another_machines_address_has_no_processes_here(engines: Engines) -> None:
    engine = engines.start()
    seen = Watch([EngineTarget("a", f"http://192.0.2.7:{engine.port}")])
    seen.tick()
    assert seen.ownership.pid("a") is None


IN_A_NAMESPACE = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
    address = struct.pack("16sH2s4s8s", b"lo", socket.AF_INET, bytes(2), socket.inet_aton("10.99.0.2"), bytes(8))
    fcntl.ioctl(made, 0x8916, address)  # SIOCSIFADDR
    fcntl.ioctl(made, 0x8914, struct.pack("16sH14s", b"lo", 0x49, bytes(14)))  # SIOCSIFFLAGS: up
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_an_engine_in_namespaces_of_its_own_is_found_by_the_address_that_it_has_there(
    engines: Engines, need_program: Callable[[str], str]
) -> None:
    (engines.folder / "vllm").symlink_to(DOUBLE)
    alone = [need_program("unshare"), "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        reason = "this machine lets nobody make namespaces"
        if os.environ.get("PAIRSCOPE_STRICT_TESTS", "") not in ("", "0"):
            pytest.fail(reason)
        pytest.skip(reason)
    inside = [sys.executable, "-c", IN_A_NAMESPACE, str(engines.folder / "vllm"), "0.0.0.0", "8123", "1"]
    engine = subprocess.Popen([*alone, *inside], stdout=subprocess.PIPE, text=True)
    engines.started.append(engine)
    assert engine.stdout is not None
    assert json.loads(engine.stdout.readline())["root"] == 1  # as it sees itself
    seen = Watch([EngineTarget("a", "http://10.99.0.2:8123"), EngineTarget("b", "http://10.99.0.3:8123")])

    def found() -> bool:
        seen.search()
        return seen.ownership.pid("a") is not None

    until(found, "its root")
    root = HOST.process(seen.ownership.pid("a") or 0)
    assert root is not None
    assert root.parent == engine.pid
    assert HOST.inner_pid(root.pid) == 1
    assert seen.ownership.pid("b") is None


def table(tree: ProcTree, *, host_pids: bool = True) -> ProcessTable:
    return ProcessTable(str(tree.root), shows_host_pids=host_pids)


CONTAINER = "0::/system.slice/docker-" + "ab" * 32 + ".scope"
OTHER = "0::/kubepods/pod1/" + "cd" * 32


def contained(folder: Path) -> tuple[ProcTree, Gpus]:
    """An engine in a container, behind Docker's proxy: pids 50 (root) and 51; 60 is another process of the container."""
    tree = ProcTree(folder / "proc")
    inside = tree.network("inside", "172.17.0.2", {8123: 9001})
    elsewhere = tree.network("elsewhere", "172.17.0.3", {8123: 9002})
    here = tree.network("here", "10.0.0.1", {8000: 9000})
    (tree.root / "self" / "net").symlink_to(here)
    proxy = ("/usr/bin/docker-proxy", "-proto", "tcp", "-host-ip", "0.0.0.0", "-host-port", "8000")
    tree.process(40, 1, arguments=(*proxy, "-container-ip", "172.17.0.2", "-container-port", "8123"))
    tree.process(50, 1, arguments=("vllm", "serve"), cgroup=CONTAINER, network=inside)
    tree.process(51, 50, arguments=("VLLM::EngineCore",), cgroup=CONTAINER, network=inside)
    tree.process(60, 1, arguments=("python", "sidecar"), cgroup=CONTAINER, network=inside)
    tree.process(70, 1, arguments=("vllm", "serve"), cgroup=OTHER, network=elsewhere)
    for pid, inode in ((40, 9000), (51, 9001), (70, 9002)):
        tree.socket(pid, inode)
    return tree, Gpus()


def test_dockers_proxy_is_seen_through(tmp_path: Path) -> None:
    tree, gpus = contained(tmp_path)
    targets = [EngineTarget("a", "http://127.0.0.1:8000"), EngineTarget("b", "http://172.17.0.3:8123")]
    seen = Watch(targets, table(tree), gpus=gpus)
    gpus.run(g0=[51], g1=[70])
    assert seen.tick() == {"a": EngineGpus((0,), "nvml", 1.0), "b": EngineGpus((1,), "nvml", 1.0)}
    assert (seen.ownership.pid("a"), seen.ownership.pid("b")) == (50, 70)


def test_two_containers_with_one_address_are_not_told_apart(tmp_path: Path) -> None:
    tree, gpus = contained(tmp_path)
    tree.process(80, 1, cgroup=OTHER, network=tree.network("twin", "172.17.0.2", {8123: 9003}))
    tree.socket(80, 9003)
    seen = Watch([EngineTarget("a", "http://127.0.0.1:8000")], table(tree), gpus=gpus)
    gpus.run(g0=[51], g1=[80])
    assert seen.tick() == {"a": None}


def test_what_computes_in_the_engines_container_beside_its_tree_is_its_own_by_the_container(tmp_path: Path) -> None:
    tree, gpus = contained(tmp_path)
    seen = Watch([EngineTarget("a", "http://127.0.0.1:8000")], table(tree), gpus=gpus)
    gpus.run(g0=[70], g2=[60])
    assert seen.tick() == {"a": EngineGpus((2,), "cgroup", 0.8)}


def test_numbers_in_a_container_count_what_the_container_was_given(tmp_path: Path) -> None:
    tree, gpus = contained(tmp_path)
    given = {"NVIDIA_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    tree.process(50, 1, arguments=("vllm", "serve"), cgroup=CONTAINER, environment=given, network=tmp_path / "inside")
    seen = Watch([EngineTarget("a", "http://127.0.0.1:8000")], table(tree), gpus=gpus)
    gpus.run(g0=[], g1=[], g2=[], g3=[])
    assert seen.tick() == {"a": EngineGpus((3,), "env", 0.6)}


def test_a_containers_own_pids_are_never_taken_for_the_drivers(engines: Engines, tmp_path: Path) -> None:
    engine = engines.start()
    blind = ProcessTable(str(tmp_path / "absent"))
    seen = watch(engine, table=ProcessTable(shows_host_pids=False), host_table=blind)
    seen.gpus.run(g0=engine.workers)  # the same numbers by chance
    assert seen.tick() == {"a": None}
    assert seen.ownership.pid("a") == engine.root
    assert seen.ownership.tag("a") == ""


def test_with_the_hosts_own_proc_a_containers_pids_are_translated(engines: Engines, tmp_path: Path) -> None:
    engine = engines.start()
    host = ProcTree(tmp_path / "proc")
    for pid, inner in ((70001, engine.workers[0]), (70002, engine.workers[1])):
        folder = host.process(pid, 1, inner_pid=inner)
        namespace = "/proc/self/ns/pid" if pid == 70001 else "/proc/self/ns/net"  # another namespace
        (folder / "ns" / "pid").symlink_to(namespace)
    seen = watch(engine, table=ProcessTable(shows_host_pids=False), host_table=table(host))
    seen.gpus.run(g0=[70002], g1=[70001], g2=engine.workers)
    assert seen.tick() == {"a": EngineGpus((1,), "cgroup", 0.8)}


def test_a_hosted_engines_tree_is_what_the_agent_started_with_what_cut_itself_loose(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path / "proc")
    tree.process(50, os.getpid(), arguments=("sh", "serve.sh"), session=50)
    tree.process(51, 50, arguments=("anything",), session=50)
    tree.process(52, 1, arguments=("a daemon",), session=50)
    tree.process(53, 52, arguments=("its child",), session=53)
    gpus = Gpus()
    seen = Watch([EngineTarget("a", "http://127.0.0.1:8000", command=("sh",))], table(tree), gpus=gpus)
    seen.ownership.sources.hosted = lambda: {"a": 50}
    gpus.run(g0=[53], g1=[54])
    assert seen.tick() == {"a": EngineGpus((0,), "nvml", 1.0)}


def test_a_hosted_container_client_is_not_the_engine(tmp_path: Path) -> None:
    tree, gpus = contained(tmp_path)
    tree.process(30, os.getpid(), arguments=("/usr/bin/docker", "run", "vllm"))
    seen = Watch([EngineTarget("a", "http://127.0.0.1:8000", command=("docker",))], table(tree), gpus=gpus)
    seen.ownership.sources.hosted = lambda: {"a": 30}
    gpus.run(g0=[51])
    assert seen.tick() == {"a": EngineGpus((0,), "nvml", 1.0)}
    assert seen.ownership.pid("a") == 50


def test_the_first_sample_of_an_engine_has_its_tag_and_says_how_it_is_known(engines: Engines) -> None:
    engine = engines.start()
    targets = [EngineTarget("a", f"http://127.0.0.1:{engine.port}")]
    ownership = EngineOwnership(targets, HOST)
    gpus = Gpus()
    gpus.run(g4=engine.workers)
    ownership.sources.gpus = [gpus]
    collector = EngineCollector({"node": "n1"}, targets, wait_s=20.0, deadline_s=10.0, ownership=ownership)
    try:
        samples = [
            check(sample)
            for number in (1, 2)
            for sample in collector.collect(Tick(number, number * 10**9, time.monotonic()))
        ]
        assert [sample.tags["gpus"] for sample in samples] == ["4", "4"]
        assert [sample.fields["gpus_mapping"] for sample in samples] == ["nvml", "nvml"]
        assert [sample.fields["procs"] for sample in samples] == [4, 4]
        assert samples[1].fields["proc_cpu_pct"] >= 0  # type: ignore[operator]
        assert samples[0].fields["requests_running"] == 3
    finally:
        collector.close()
