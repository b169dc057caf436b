"""Dialects of engines: one file a kind. To add a kind: its file, and its line in registry.py.

Names are matched, never HELP or TYPE: those change freely.
"""
