"""The command line."""


def main() -> None:
    raise SystemExit("pairscope: no command yet")
