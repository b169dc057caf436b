"""The embedded store: one SQLite file in WAL mode, one wide row per device and time."""
