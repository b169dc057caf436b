"""Real inference servers, started here and read as the agent reads them; for `bench/live_engines.py` and where one is installed."""
