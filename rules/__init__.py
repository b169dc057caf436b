"""Rules: from samples to evidence, from evidence through the fixed triage order to a verdict, from verdicts to alerts.

One rule is one small function that returns a finding with its paired numbers; thresholds and priors live in one file.
May import `telemetry` only.
"""
