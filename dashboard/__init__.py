"""Dashboard: the Dash app that shows what is spent beside what is yielded, and the verdict in words on top.

It reads the store and the rules' verdicts, nothing else, and writes nothing.
May import `telemetry` and the public types of `rules`.
"""
