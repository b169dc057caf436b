"""Expositions of engines in miniature, one file a kind: the families and labels that each release has, values of our own."""
