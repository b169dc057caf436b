"""AMD's management library (AMD SMI) as PairScope reads it: every number of the `gpu` measurement that it gives, in product units.

Only the reader process imports the modules that call the driver. May import `telemetry` and the rest of `agent`.
"""
