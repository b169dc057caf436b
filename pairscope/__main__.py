"""`pairscope`, and `python -m pairscope`: the command line, which Ctrl-C also ends quietly while it is still being loaded."""

import os
import signal

STOPPED = 130  # what a shell expects of a command that Ctrl-C ended

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where whoever started us has it ignored
    signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(STOPPED))

from pairscope.cli import app  # noqa: E402 - seconds, on a busy machine

if callable(signal.getsignal(signal.SIGINT)):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
