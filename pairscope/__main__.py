"""`python -m pairscope` is the command line."""

from pairscope.cli import main

main()
