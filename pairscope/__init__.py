"""PairScope: the roof. The command line, the one configuration, and `up`, which wires the parts together.

Nothing is measured, judged or drawn here: it only gathers settings, starts parts and speaks to the person at the terminal.
May import every other package; none may import it.
"""

__version__ = "0.1.0"
