"""The drill: simulated faults are played at a person, whose guesses are scored against the truth and set beside triage's own."""
