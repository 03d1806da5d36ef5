"""Embedding tables: parameters of which a mini-batch touches few rows. Servers hold the rows, and only rows are sent.

table.py    one table on one rank: its rows, its sparse gradient, which server holds which rows
server.py   the loop of a rank that holds some rows of every table
client.py   the client of a worker: pull rows, push rows
"""

from manyhands.servers.embeddings.client import EmbeddingClient
from manyhands.servers.embeddings.server import EmbeddingServer
from manyhands.servers.embeddings.table import EmbeddingTable, find_tables

__all__ = ["EmbeddingClient", "EmbeddingServer", "EmbeddingTable", "find_tables"]
