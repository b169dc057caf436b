"""llama.cpp as a library, run by the interpreter of its own environment: each line of input is a number of streams and of
output tokens, each line of output what a greedy batch of so many took. Needs llama-cpp-python and numpy, nothing of this project.

python bench/llama_batch.py MODEL.gguf TOKENS MOST_STREAMS
"""

from __future__ import annotations

import ctypes
import json
import sys
import time

import llama_cpp  # type: ignore[import-not-found]
import numpy as np

PROMPT = b"The history of computing begins with a simple question"
THREADS = 2


class Batch:
    """One loaded model and a context for `most` sequences."""

    def __init__(self, path: str, tokens: int, most: int) -> None:
        llama_cpp.llama_log_set(_QUIET, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = most * (tokens + 64), 512, most
        params.n_threads = params.n_threads_batch = THREADS
        if hasattr(params, "kv_unified"):
            params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        room = (llama_cpp.llama_token * 64)()
        count = llama_cpp.llama_tokenize(vocabulary, PROMPT, len(PROMPT), room, 64, True, True)
        self.prompt = list(room[:count])
        self.batch = llama_cpp.llama_batch_init(max(512, most), 0, 1)

    def run(self, streams: int, tokens: int) -> float:
        """Seconds for `streams` answers, prompts included."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        began = time.perf_counter()
        rows = [
            (token, at, stream, at == len(self.prompt) - 1)
            for stream in range(streams)
            for at, token in enumerate(self.prompt)
        ]
        for at in range(0, len(rows), 510 // len(self.prompt) * len(self.prompt)):
            part = rows[at : at + 510 // len(self.prompt) * len(self.prompt)]
            self._decode(part)
        last = [len(self.prompt) * (stream + 1) - 1 for stream in range(streams)]
        chosen = [self._likeliest(row) for row in last]
        for step in range(1, tokens):
            at = len(self.prompt) + step - 1
            self._decode([(token, at, stream, True) for stream, token in enumerate(chosen)])
            chosen = [self._likeliest(row) for row in range(streams)]
        return time.perf_counter() - began

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence, wanted
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _QUIET(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    pass


def main() -> int:
    path, tokens, most = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    batch = Batch(path, tokens, most)
    system = llama_cpp.llama_print_system_info().decode()
    print(json.dumps({"version": llama_cpp.__version__, "system": system}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": batch.run(*map(int, line.split()))}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
