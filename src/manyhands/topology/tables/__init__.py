"""Tables: parameters of which a mini-batch touches few rows. Their rows are spread over keepers, and only rows travel.

table.py    one table on one rank: its rows, its sparse gradient, who keeps what
keeper.py   the loop of whoever keeps some rows of every table
spread.py   all tables as a worker reaches them: pull rows, push rows
"""

from manyhands.topology.tables.keeper import Keeper
from manyhands.topology.tables.spread import Spread
from manyhands.topology.tables.table import Table, find_tables

__all__ = ["Keeper", "Spread", "Table", "find_tables"]
