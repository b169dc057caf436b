"""What an engine's processes take is a difference of readings of the same processes, and never of others with their numbers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.engine_cpu import LOOKED_AT, BusiestThread, TreeCpu
from agent.process_table import Process, ProcessTable, ancestors, descendants
from tests.doubles.proc_tree import ProcTree

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path / "proc")


def members(tree: ProcTree, *pids: int) -> list[Process]:
    table = ProcessTable(str(tree.root))
    return [process for pid in pids if (process := table.process(pid)) is not None]


def test_a_trees_cpu_and_memory_are_the_sum_of_its_processes(tree: ProcTree) -> None:
    tree.process(10, 1, cpu_ticks=(100, 50), pages=7)
    tree.process(11, 10, cpu_ticks=(1000, 0), pages=11, name="VLLM::(worker) 0 (x")
    cpu = TreeCpu(ProcessTable(str(tree.root)))
    known = members(tree, 10, 11)
    assert cpu.read(known, 50.0) == {"procs": 2, "proc_rss_bytes": 18.0 * PAGE}
    tree.process(10, 1, cpu_ticks=(100 + TICKS // 2, 50 + TICKS // 4), pages=8)
    tree.process(11, 10, cpu_ticks=(1000 + 2 * TICKS, 0), pages=11)
    fields = cpu.read(known, 52.0)
    assert fields == {"procs": 2, "proc_rss_bytes": 19.0 * PAGE, "proc_cpu_pct": pytest.approx(137.5)}


def test_a_process_that_ends_or_whose_pid_is_used_again_makes_no_jump(tree: ProcTree) -> None:
    tree.process(10, 1, cpu_ticks=(100, 0))
    tree.process(11, 10, cpu_ticks=(90_000, 0))
    cpu = TreeCpu(ProcessTable(str(tree.root)))
    known = members(tree, 10, 11)
    cpu.read(known, 1.0)
    tree.process(10, 1, cpu_ticks=(100 + TICKS, 0))
    tree.process(11, 10, cpu_ticks=(95_000, 0), started=5555)
    fields = cpu.read(known, 2.0)
    assert (fields["procs"], fields["proc_cpu_pct"]) == (1, pytest.approx(100.0))
    tree.process(10, 1, cpu_ticks=(100 + TICKS, 0), state="Z")
    assert cpu.read(known, 3.0) == {}


def test_the_busiest_thread_is_one_thread_and_not_the_sum_of_a_process(tree: ProcTree) -> None:
    tree.process(10, 1)
    tree.process(11, 10)
    for tid in (10, 21, 22):
        tree.thread(10, tid, (100, 100))
    tree.thread(11, 11, (0, 0))
    busiest = BusiestThread(ProcessTable(str(tree.root)))
    known = members(tree, 10, 11)
    assert busiest.read(known, 100.0) is None
    tree.process(10, 1, cpu_ticks=(6 * TICKS, 0))
    for tid, ticks in ((10, 1), (21, 2), (22, 3)):
        tree.thread(10, tid, (100 + ticks * TICKS, 100))
    assert busiest.read(known, 105.0) == pytest.approx(60.0)
    tree.process(10, 1, cpu_ticks=(12 * TICKS, 0))
    for tid, ticks in ((10, 2), (21, 6), (22, 4)):
        tree.thread(10, tid, (100 + ticks * TICKS, 100))
    assert busiest.read(known, 110.0) == pytest.approx(80.0)


def test_a_thread_whose_number_is_used_again_counts_from_its_own_first_reading(tree: ProcTree) -> None:
    tree.process(10, 1)
    tree.thread(10, 10, (0, 0))
    tree.thread(10, 30, (500, 0))
    busiest = BusiestThread(ProcessTable(str(tree.root)))
    busiest.read(members(tree, 10), 100.0)
    tree.process(10, 1, cpu_ticks=(2 * TICKS, 0))
    tree.thread(10, 10, (TICKS, 0))
    tree.thread(10, 30, (90_000, 0), started=9999)
    assert busiest.read(members(tree, 10), 105.0) == pytest.approx(20.0)


def test_threads_are_read_of_a_few_processes_only(tree: ProcTree) -> None:
    pids = range(10, 30)
    for pid in pids:
        tree.process(pid, 1)
        tree.thread(pid, pid, (0, 0))
    read: list[int] = []

    class Counting(ProcessTable):
        def threads(self, pid: int) -> list[Process]:
            read.append(pid)
            return super().threads(pid)

    busiest = BusiestThread(Counting(str(tree.root)))
    known = members(tree, *pids)
    busiest.read(known, 100.0)
    read.clear()
    for pid in pids:
        tree.process(pid, 1, cpu_ticks=(pid * TICKS, 0))
    busiest.read(known, 105.0)
    assert sorted(read) == list(pids)[-LOOKED_AT:]


def test_a_tree_is_followed_down_and_up_and_a_circle_ends(tree: ProcTree) -> None:
    table = ProcessTable(str(tree.root))
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1), (31, 32), (32, 31)):
        tree.process(pid, parent)
    processes = table.all()
    assert set(descendants([10], processes)) == {10, 11, 12}
    assert set(descendants([31, 99], processes)) == {31, 32}
    assert ancestors(12, processes) == [11, 10, 1]
    assert ancestors(31, processes) == [32, 31]


@pytest.mark.parametrize(
    "text", ["", "7", "7 (x", "7 (x) S 1", "7 (x) S a b c d e f g h i j k l m n o p q r s t u v w"]
)
def test_a_stat_that_is_cut_off_is_no_process(tree: ProcTree, text: str) -> None:
    tree.process(7, 1)
    (tree.root / "7" / "stat").write_text(text)
    assert ProcessTable(str(tree.root)).process(7) is None


def test_what_a_process_was_started_with_is_read_once(tree: ProcTree) -> None:
    table = ProcessTable(str(tree.root))
    tree.process(10, 1, arguments=("vllm", "serve"), environment={"CUDA_VISIBLE_DEVICES": "2", "A": "b=c"})
    process = members(tree, 10)[0]
    assert table.arguments(process) == ("vllm", "serve")
    assert table.environment(process) == {"CUDA_VISIBLE_DEVICES": "2", "A": "b=c"}
    (tree.root / "10" / "cmdline").write_bytes(b"VLLM::EngineCore\0")
    (tree.root / "10" / "environ").write_bytes(b"\0" * 40)
    assert table.arguments(process) == ("vllm", "serve")
    assert table.environment(process)["CUDA_VISIBLE_DEVICES"] == "2"
    assert ProcessTable(str(tree.root)).environment(process) == {}
