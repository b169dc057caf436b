"""Steps of the wall clock are noticed with their size; slewing and being held up are not steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import STEP_THRESHOLD_S, StepDetector, SystemClock, read_together
from tests.doubles.fake_clock import FakeClock


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 3.0, -3.0, 0.5])
def test_a_step_is_told_with_its_size_once(step_s: float) -> None:
    clock, detector = FakeClock(), StepDetector()
    assert detector.step_s(clock.wall_ns(), clock.monotonic_s()) is None
    clock.advance(1.0)
    clock.wall_s += step_s
    assert detector.step_s(clock.wall_ns(), clock.monotonic_s()) == pytest.approx(step_s, abs=1e-6)
    clock.advance(1.0)
    assert detector.step_s(clock.wall_ns(), clock.monotonic_s()) is None


def test_a_slew_is_no_step() -> None:
    clock, detector = FakeClock(), StepDetector()
    for _ in range(400):
        clock.advance(1.0)
        clock.wall_s += 0.0005
        assert detector.step_s(clock.wall_ns(), clock.monotonic_s()) is None


@given(st.lists(st.tuples(st.floats(0.01, 100), st.sampled_from([0.0, 0.0, 0.1, -0.1, 3.0, -3.0, 3600.0, -3600.0]))))
def test_exactly_the_steps_beyond_the_threshold_are_told(moves: list[tuple[float, float]]) -> None:
    clock, detector = FakeClock(), StepDetector()
    detector.step_s(clock.wall_ns(), clock.monotonic_s())
    for passed_s, step_s in moves:
        clock.advance(passed_s)
        clock.wall_s += step_s
        told = detector.step_s(clock.wall_ns(), clock.monotonic_s())
        assert (told is not None) is (abs(step_s) > STEP_THRESHOLD_S)
        assert told is None or told == pytest.approx(step_s, abs=1e-4)


def test_a_reading_during_which_the_process_was_held_up_is_read_again() -> None:
    class Held(FakeClock):
        held = 1

        def wall_ns(self) -> int:
            now = super().wall_ns()
            if self.held:
                self.held -= 1
                self.advance(5.0)
            return now

    clock = Held()
    wall_ns, monotonic_s = read_together(clock)
    assert wall_ns == clock.wall_ns()
    assert monotonic_s == clock.monotonic_s()


def test_the_system_clock_reads_both_clocks() -> None:
    first = read_together(SystemClock())
    second = read_together(SystemClock())
    assert second[0] >= first[0] > 1_700_000_000 * 10**9
    assert second[1] >= first[1]
