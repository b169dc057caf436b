"""Whatever happens to the files of a spool, it starts, gives out what is whole, and goes on."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.spool import Spool
from agent.spool.cursor import Delivered
from agent.spool.disk import Disk
from agent.spool.segment import Record, encode, pack, scan, to_lines, to_samples, unpack
from telemetry.sample import Sample

S = 10**9
T0 = 1_795_960_800 * S
ROOT = Path(__file__).parents[2]


def host(second: int) -> Sample:
    return Sample("host", {"node": "n1"}, {"load1": second / 7}, T0 + second * S)


def event(second: int) -> Sample:
    return Sample("event", {"node": "n1", "kind": "xid", "subject": "0"}, {"code": second}, T0 + second * S)


def manual(folder: Path, **options: int) -> Spool:
    return Spool(folder, commit_every_s=None, min_free_bytes=0, **options)  # type: ignore[arg-type]


def drain(spool: Spool) -> list[Sample]:
    found: list[Sample] = []
    for _ in range(10_000):
        if not spool.waiting_blocks:
            return found
        blocks = spool.live(10**9) or spool.backlog(500)
        found += [sample for block in blocks for sample in block.samples()]
        spool.delivered(blocks)
    raise AssertionError(f"{spool.waiting_blocks} blocks wait for ever")


def fill(folder: Path, seconds: int, **options: int) -> None:
    spool = manual(folder, **options)
    for second in range(seconds):
        spool.append([host(second), *([event(second)] if second % 5 == 0 else [])])
        spool.commit()
    spool.delivered(spool.live(10**9)[: seconds // 4])
    spool.commit()
    spool.close()


class Unsynced(Disk):
    """Syncing thousands of times is for the tests of power cuts."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


# --- the form of a segment


@given(st.lists(st.binary(max_size=60), max_size=8), st.binary(max_size=40))
def test_records_are_found_again_between_any_noise(payloads: list[bytes], noise: bytes) -> None:
    records = [Record(number, 1, number, payload) for number, payload in enumerate(payloads)]
    data = b"".join(noise + encode(record) for record in records) + noise
    found = scan(data)
    assert list(found.records) == records
    assert found.damaged_bytes + found.torn_bytes == len(noise) * (len(records) + 1)


def test_one_hit_record_costs_one_record() -> None:
    records = [Record(number, 1, number, os.urandom(50)) for number in range(20)]
    whole = b"".join(encode(record) for record in records)
    length = len(encode(records[0]))
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 0x10
        assert list(scan(bytes(data)).records) == [r for r in records if r.sequence != place // length]


def test_every_cut_leaves_all_whole_records_and_is_known_as_torn() -> None:
    records = [Record(number, 1, number, b"x" * 30) for number in range(3)]
    whole = b"".join(encode(record) for record in records)
    length = len(encode(records[0]))
    for size in range(len(whole)):
        found = scan(whole[:size])
        assert list(found.records) == records[: size // length]
        assert (found.torn_bytes, found.damaged_bytes) == (size % length, 0)


def test_a_payload_that_unpacks_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [host(second) for second in range(1000)]
    payload = pack(to_lines(samples))
    assert to_samples(unpack(payload)) == samples
    monkeypatch.setattr("agent.spool.segment.MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(ValueError, match="too large"):
        unpack(payload)


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 8)), max_size=20))
def test_delivered_is_a_set_of_numbers(spans: list[tuple[int, int]]) -> None:
    delivered, model = Delivered(), set[int]()
    for first, length in spans:
        delivered.add(first, first + length - 1)
        model |= set(range(first, first + length))
    assert {number for number in range(80) if number in delivered} == model
    assert delivered.missing(50) == len(set(range(1, 51)) - model)
    assert delivered.highest == max(model, default=0)
    assert all(b[0] - a[1] > 1 for a, b in zip(delivered.runs, delivered.runs[1:], strict=False))
    lacking = set(range(3, 80, 3)) | {41, 42, 43}
    assert {number for number in range(80) if number in delivered.without(lacking)} == model - lacking
    for first in range(1, 70, 7):
        assert delivered.covers(first, first + 5) == (set(range(first, first + 6)) <= model)


def test_a_hit_on_a_record_that_others_lean_on_costs_a_minute_and_any_other_hit_one_second(tmp_path: Path) -> None:
    seconds = 200
    lost: list[int] = []
    for place in range(30, 12_000, 997):
        folder = tmp_path / f"spool{place}"
        spool = Spool(folder, commit_every_s=None, min_free_bytes=0, disk=Unsynced())
        for second in range(seconds):
            spool.append([host(second)])
            spool.commit()
        spool.close()
        path = next(folder.glob("data-*.seg"))
        data = bytearray(path.read_bytes())
        data[place % len(data)] ^= 1
        path.write_bytes(data)
        again = Spool(folder, commit_every_s=None, min_free_bytes=0, disk=Unsynced())
        lost.append(seconds - len(drain(again)))
        again.close()
    assert 1 in lost and set(lost) <= {1, 65, seconds - 3 * 65}


# --- random damage


def damage(folder: Path, rng: random.Random) -> str:
    """Do one thing to one file; what it was."""
    path = rng.choice(sorted(p for p in folder.iterdir() if p.is_file() and p.name != "lock"))
    data = bytearray(path.read_bytes())
    place = rng.randrange(len(data) + 1)
    kind = rng.choice(
        ["flip", "flips", "cut", "zero", "noise", "insert", "remove", "repeat", "empty", "unlink", "rename"]
    )
    if kind == "flip" and data:
        data[place % len(data)] ^= 1 << rng.randrange(8)
    elif kind == "flips" and data:
        for _ in range(rng.randrange(2, 60)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "zero":
        page = place // 512 * 512
        data[page : page + 512] = bytes(len(data[page : page + 512]))
    elif kind == "noise":
        data[place:] = rng.randbytes(rng.randrange(2000))
    elif kind == "insert":
        data[place:place] = rng.randbytes(rng.randrange(1, 300))
    elif kind == "remove":
        del data[place : place + rng.randrange(1, 300)]
    elif kind == "repeat":
        data.extend(bytes(data))
    elif kind == "empty":
        data.clear()
    elif kind == "unlink":
        path.unlink()
        return f"{kind} {path.name}"
    elif kind == "rename":
        path.rename(
            path.with_name(rng.choice(["data-000000000000.seg", "data-999999999999.seg", "keep-x.seg", "junk"]))
        )
        return f"{kind} {path.name}"
    path.write_bytes(data)
    return f"{kind} {path.name} at {place}"


MOST_LOST = {"repeat": 0, "flip keep": 1, "insert keep": 1, "remove keep": 5, "zero keep": 8}
"""Commits that one hit on the events may cost: those whose bytes it touched, and no others."""


@pytest.mark.parametrize("trials", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_random_damage_never_blocks_a_start_and_never_makes_up_a_sample(
    tmp_path: Path, trials: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    logging.disable(logging.WARNING)
    rng = random.Random(trials)
    pattern = tmp_path / "pattern"
    fill(pattern, 60, segment_bytes=2048)
    delivered = [host(second) for second in range(60)] + [event(second) for second in range(0, 60, 5)]
    shutil.copytree(pattern, tmp_path / "spool")
    spool = manual(tmp_path / "spool")
    everything = drain(spool)
    spool.close()
    assert len(everything) > 50
    try:
        for _ in range(trials):
            folder = tmp_path / "spool"
            shutil.rmtree(folder)
            shutil.copytree(pattern, folder)
            done = [damage(folder, rng) for _ in range(rng.choice([1, 1, 1, 2, 5]))]
            spool = Spool(folder, commit_every_s=None, min_free_bytes=0, segment_bytes=2048, disk=Unsynced())
            spool.append([host(1000)])
            assert spool.commit(), done
            found = drain(spool)
            assert host(1000) in found, done
            assert all(sample in everything or sample in delivered or sample == host(1000) for sample in found), done
            lost = {sample.time_ns for sample in everything if sample not in found}
            if len(done) == 1:
                most = MOST_LOST.get(done[0].split()[0], MOST_LOST.get(done[0].split("-")[0], 60))
                assert len(lost) <= most, done
            spool.close()
            again = Spool(folder, commit_every_s=None, min_free_bytes=0, disk=Unsynced())
            assert again.waiting_blocks == 0, done
            again.close()
    finally:
        logging.disable(logging.NOTSET)


def test_a_damaged_segment_is_kept_for_whoever_looks_into_it_and_they_do_not_pile_up(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    for _ in range(7):
        fill(folder, 20, segment_bytes=4096)
        for path in folder.glob("data-*.seg"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        spool = manual(folder)
        drain(spool)
        spool.close()
        assert list(folder.glob("*.seg")) == []
    assert 1 <= len(list((folder / "damaged").iterdir())) <= 4


# --- room


def test_a_full_file_system_is_survived_and_left_again(small_disk: Callable[[int], Path]) -> None:
    small = small_disk(512 * 1024)
    spool = manual(small / "spool")
    spool.append([host(0), event(0)])
    assert spool.commit()
    with (small / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    refused = 0
    for second in range(1, 120):
        spool.append([host(second * 1000 + i) for i in range(100)] + [event(second)])
        refused += not spool.commit()
    assert refused > 50
    (small / "ballast").unlink()
    ticket = spool.append([host(999_999)])
    assert spool.commit() and spool.acknowledged == ticket
    found = drain(spool)
    assert {event(second).time_ns for second in range(120)} <= {s.time_ns for s in found}
    assert len(found) + spool.dropped_total == 1 + 1 + 119 * 101 + 1
    spool.commit()
    spool.close()
    assert list((small / "spool").glob("*.seg")) == []


def test_a_limit_on_file_size_only_makes_shorter_segments(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    spool = manual(tmp_path / "spool", segment_bytes=1 << 20)
    rng = random.Random(1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        for second in range(60):
            values = [Sample("host", {"node": f"n{i}"}, {"load1": rng.random()}, T0 + second * S) for i in range(100)]
            spool.append(values)
            assert spool.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    sizes = [path.stat().st_size for path in (tmp_path / "spool").glob("data-*.seg")]
    assert len(sizes) > 3 and max(sizes) <= 20_000
    assert len(drain(spool)) == 6000 and spool.dropped_total == 0
    spool.close()


# --- another process


def test_a_second_process_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    spool = manual(tmp_path / "spool")
    code = """
        import sys
        from agent.spool import Spool, SpoolError
        try:
            Spool(sys.argv[1])
        except SpoolError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "spool")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert "another process uses it" in result.stdout, result.stderr
    spool.close()
