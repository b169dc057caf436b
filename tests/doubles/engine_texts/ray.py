"""Ray Serve's node agent in miniature: the families of each replica, in Ray's spelling."""

from __future__ import annotations

from collections.abc import Sequence

from tests.doubles.engine_texts.text import MODEL, labelled, lines, timed


def ray_vllm(
    *, generated: Sequence[float] = (3_000.0, 1_200.0), colon: bool = False, doubled: bool = True, replicas: bool = True
) -> str:
    """`colon`: vLLM to 0.10.2, without ReplicaId. `doubled`: each counter also as a gauge that is about to go."""
    prefix = "ray_vllm:" if colon else "ray_vllm_"
    usage = "gpu_cache_usage_perc" if colon else "kv_cache_usage_perc"
    made = ""
    for number, tokens in enumerate(generated):
        own = {"Component": "core_worker", "SessionName": "s", "Version": "2.60.0", "WorkerId": f"w{number}"}
        replica = {"ReplicaId": f"r{number}"} if replicas and not colon else {}
        labels = labelled({**own, **replica, "engine": "0", "model_name": MODEL})
        values = {
            "num_requests_running": 4.0 + number,
            "num_requests_waiting": 1.0 + number,
            usage: 0.5 - 0.2 * number,
            "generation_tokens_total": tokens,
            "prompt_tokens_total": tokens * 3,
        }
        if doubled:
            values |= {"generation_tokens": tokens, "prompt_tokens": tokens * 3}
        made += lines({f"{prefix}{name}": value for name, value in values.items()}, labels)
        info = labelled({**own, **replica, "engine": "0", "block_size": 16, "num_gpu_blocks": 1_000 + 500 * number})
        made += lines({f"{prefix}cache_config_info": 1.0}, info)
        made += timed(f"{prefix}time_to_first_token_seconds", labels, (0.1, 0.25), 150.0, 30.0)
    return made
