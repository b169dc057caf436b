"""Scenes to look at: what agents and triage would have written about a fleet, with an incident on one pair."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rules.verdict import Cause, Cost, Diagnosis, Fix, Line, Status, Step, StepReport, Verdict, to_sample
from telemetry import messages
from telemetry.sample import Sample, Value

SECOND = 1_000_000_000
SENTENCES = {
    "scene.headline": {
        "en": "Output fell {loss:.0f} % while GPU-Util stayed at {util:.0f} %",
        "zh": "GPU 利用率保持 {util:.0f} %,产出下降 {loss:.0f} %",
    },
    "scene.healthy": {"en": "Output is {output:.0f} % of expected", "zh": "产出为预期的 {output:.0f} %"},
    "scene.fresh": {"en": "samples are fresh (1 s old)", "zh": "样本新鲜(1 秒前)"},
    "scene.heat": {
        "en": "HW-thermal bit set {share:.0f} % of the time; SM clock 1 290 of 1 905 MHz; inlet 24 → 31 °C, 4 min before the drop",
        "zh": "{share:.0f} % 的时间出现硬件过热位;SM 时钟 1 290 / 1 905 MHz;进风 24 → 31 °C,早于下降 4 分钟",
    },
    "scene.kv": {"en": "KV used {kv:.0f} %, 0 preemptions", "zh": "KV 已用 {kv:.0f} %,0 次抢占"},
    "scene.prompts": {"en": "prompt p50 412 → 405 tokens", "zh": "提示长度 p50 412 → 405"},
    "scene.queue": {
        "en": "queue 5 → 19: follows the clock, does not lead it",
        "zh": "排队 5 → 19:晚于时钟下降,是结果而非原因",
    },
    "scene.deploys": {"en": "no deploy events received for this host", "zh": "未收到该主机的发布事件"},
    "scene.fans": {"en": "check the inlet air and the fan speed of the rack", "zh": "检查机架进风与风扇转速"},
    "scene.drain": {"en": "drain the node if the inlet stays above 32 °C", "zh": "进风持续高于 32 °C 时下线该节点"},
    "scene.paste": {"en": "renew the thermal paste of GPU 3", "zh": "更换 GPU 3 的导热硅脂"},
}


def know_sentences() -> None:
    """Make the scene's sentences known to `say`; the catalogue is read once and kept."""
    messages.catalogue().update(SENTENCES)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Incident:
    start_ns: int
    end_ns: int
    depth: float = 0.31

    def at(self, time_ns: int) -> float:
        """0 outside, 1 inside."""
        return 1.0 if self.start_ns <= time_ns < self.end_ns else 0.0


NONE = Incident(0, 0)


def tags_of(node: str, rack: str = "row-B", *, simulated: bool = False) -> dict[str, str]:
    tags = {"node": node, "rack": rack, "cluster": "dc-1"}
    return tags | {"origin": "simulated"} if simulated else tags


def gpu_pair(
    node: str,
    engine: str,
    gpus: tuple[int, ...],
    start_ns: int,
    end_ns: int,
    incident: Incident = NONE,
    *,
    step_s: float = 1.0,
    rack: str = "row-B",
    model: str = "qwen2-7b",
    simulated: bool = False,
    seed: int = 1,
) -> Iterator[Sample]:
    """An engine on GPUs that throttle for heat during the incident, its host, and the pair that triage writes each 5 s."""
    rng = random.Random(f"{node}/{engine}/{seed}")
    tags = tags_of(node, rack, simulated=simulated)
    names = "+".join(str(gpu) for gpu in gpus)
    engine_tags = {**tags, "engine": engine, "kind": "vllm", "model": model, "gpus": names}
    count = int((end_ns - start_ns) / (step_s * SECOND))
    thermal_s = 0.0
    brake_s = 0.0
    for i in range(count):
        now = start_ns + int(i * step_s * SECOND)
        hot = incident.at(now)
        warm = min(1.0, max(0.0, (now - incident.start_ns) / (240 * SECOND) + 1)) if incident is not NONE else 0.0
        slow = incident.depth * hot * (0.85 + 0.3 * rng.random())
        wave = 1.5 * math.sin(i * step_s / 240)
        output = 100 * (1 - slow) + wave + rng.gauss(0, 0.9)
        thermal_s += hot * step_s * (0.65 + 0.3 * rng.random())
        brake_s += step_s if 0.30 < i / count < 0.303 else 0.0
        for gpu in gpus:
            clock = 1905 - hot * (420 + 260 * rng.random()) + rng.gauss(0, 4)
            fields: dict[str, Value] = {
                "util_pct": 98.0 + rng.gauss(0, 0.6),
                "temp_c": 74 + 11 * warm * (0.4 + 0.6 * hot) + wave + rng.gauss(0, 0.25) + gpu * 0.2,
                "temp_limit_c": 87.0,
                "sm_clock_mhz": clock,
                "sm_clock_max_mhz": 1980.0,
                "power_w": 640 - 150 * slow / 0.31 + rng.gauss(0, 6),
                "power_limit_w": 700.0,
                "throttle_reasons": (0x40 | 0x20) if hot and rng.random() < 0.8 else 0,
                "throttle_hw_thermal_s": thermal_s,
                "throttle_sw_thermal_s": thermal_s * 0.6,
                "throttle_sw_power_s": 0.0,
                "throttle_hw_power_brake_s": brake_s,
                "state": 0,
            }
            yield Sample("gpu", {**tags, "gpu": str(gpu), "uuid": f"GPU-{node}-{gpu}"}, fields, now)
        kv = 68 + 6 * math.sin(i * step_s / 400) - 7 * hot + rng.gauss(0, 0.4)
        yield Sample(
            "engine",
            engine_tags,
            {
                "tokens_per_s": max(0.0, 23.3 * output),
                "requests_running": 41.0 + rng.gauss(0, 1),
                "requests_waiting": max(0.0, 4 + 15 * hot + rng.gauss(0, 0.9)),
                "kv_used_pct": kv,
                "kv_fragmentation_pct": 9 + rng.gauss(0, 0.3),
                "up": 1,
            },
            now,
        )
        yield Sample("host", tags, {"cpu_pct": 21 + rng.gauss(0, 1), "cpu_core_max_pct": 64 + rng.gauss(0, 4)}, now)
        if i * step_s % 5 < step_s:
            yield Sample("thermal", tags, {"inlet_c": 24 + 7 * warm + rng.gauss(0, 0.1)}, now)
            yield Sample("power", tags, {"headroom_pct": 13 + 11 * hot + rng.gauss(0, 0.7)}, now)
            yield pair_sample(engine_tags, now, output, 98.0, 2330.0, "gpu")


def cpu_pair(node: str, engine: str, start_ns: int, end_ns: int, *, step_s: float = 1.0) -> Iterator[Sample]:
    """An engine on a host without a GPU."""
    rng = random.Random(f"{node}/{engine}")
    tags = {"node": node}
    engine_tags = {**tags, "engine": engine, "kind": "pairscope", "model": "smollm2-135m-instruct"}
    for i in range(int((end_ns - start_ns) / (step_s * SECOND))):
        now = start_ns + int(i * step_s * SECOND)
        tokens = 118 + 9 * math.sin(i / 90) + rng.gauss(0, 3)
        cpu = 88 + 4 * math.sin(i / 70) + rng.gauss(0, 2)
        yield Sample("host", tags, {"cpu_pct": min(100.0, cpu), "cpu_core_max_pct": min(100.0, cpu + 8)}, now)
        yield Sample(
            "engine",
            engine_tags,
            {
                "tokens_per_s": tokens,
                "requests_running": float(rng.randint(3, 6)),
                "requests_waiting": float(max(0, rng.randint(-3, 2))),
                "kv_used_pct": 31 + 8 * math.sin(i / 50) + rng.gauss(0, 1),
                "kv_fragmentation_pct": 4.0,
                "up": 1,
            },
            now,
        )
        if i % 5 == 0:
            yield pair_sample(engine_tags, now, 100 * tokens / 119, cpu, 119.0, "cpu")


def pair_sample(
    engine_tags: dict[str, str], now: int, output: float, util: float, expected: float, effort: str
) -> Sample:
    tags = {name: value for name, value in engine_tags.items() if name != "kind"}
    fields: dict[str, Value] = {
        "output_pct": output,
        "util_pct": util,
        "tokens_per_s": output * expected / 100,
        "expected_tokens_per_s": expected,
        "effort": effort,
        "baseline": "history",
    }
    return Sample("pair", tags, fields, now)


def steps(hot: bool) -> tuple[StepReport, ...]:
    heat = Line("scene.heat", {"share": 78.0}, "gpu.temp_c")
    queue = Line("scene.queue", {}, "engine.requests_waiting")
    return (
        StepReport(Step.VALIDITY, Status.RULED_OUT, (Line("scene.fresh"),)),
        StepReport(
            Step.PHYSICAL,
            Status.CONFIRMED if hot else Status.RULED_OUT,
            (heat,) if hot else (),
            0.4,
            0.92 if hot else 0.04,
        ),
        StepReport(Step.MEMORY, Status.RULED_OUT, (Line("scene.kv", {"kv": 61.0}),), 0.25, 0.02),
        StepReport(Step.REQUESTS, Status.RULED_OUT, (Line("scene.prompts"),), 0.2, 0.02),
        StepReport(Step.SCHEDULING, Status.SYMPTOM if hot else Status.RULED_OUT, (queue,) if hot else (), 0.1, 0.03),
        StepReport(Step.SOFTWARE, Status.NO_DATA, (Line("scene.deploys"),), 0.05, 0.01),
    )


def diagnosis(subject: dict[str, str], now: int, incident: Incident = NONE) -> Diagnosis:
    """What triage says at `now`: thermal throttling inside the incident, else that nothing is wrong."""
    hot = bool(incident.at(now))
    headline = Line("scene.headline", {"loss": 31.0, "util": 98.0}) if hot else Line("scene.healthy", {"output": 99.0})
    verdict = Verdict(
        Cause.THERMAL,
        Step.PHYSICAL,
        0.92,
        31.0,
        "engine",
        subject,
        incident.start_ns,
        (Line("scene.heat", {"share": 78.0}, "gpu.temp_c"),),
        (
            Fix("scene.fans", Cost.OPERATIONS_CHEAP),
            Fix("scene.drain", Cost.OPERATIONS_CHEAP),
            Fix("scene.paste", Cost.HARDWARE_COSTLY),
        ),
        headline,
    )
    return Diagnosis(
        subject=subject,
        at_ns=now,
        steps=steps(hot),
        verdicts=(verdict,) if hot else (),
        headline=headline,
        output_pct=69.0 if hot else 99.0,
        util_pct=98.0,
        expected_tokens_per_s=2330.0,
        tokens_per_s=1608.0 if hot else 2307.0,
        simulated=subject.get("origin") == "simulated",
    )


def verdicts(subject: dict[str, str], start_ns: int, end_ns: int, incident: Incident = NONE) -> Iterator[Sample]:
    for now in range(start_ns, end_ns, 5 * SECOND):
        yield to_sample(diagnosis(subject, now, incident))


def event(node: str, kind: str, subject: str, text: str, now: int, code: int = 0) -> Sample:
    return Sample("event", {**tags_of(node), "kind": kind, "subject": subject}, {"text": text, "code": code}, now)
