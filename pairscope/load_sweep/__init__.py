"""The batch sweep: an engine is loaded with more and more requests at once, and a rule says how many are worth it."""
