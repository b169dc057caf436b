"""Telemetry: what is measured (the catalogue), in which record (the sample), and where it is kept (the stores).

The ground floor of the house: it holds the data contract and every user-visible sentence, and knows nobody above.
May import the standard library and third-party packages only; every other package may import it.
"""
