"""Parameter servers: the weights in shards, and the ways of a worker to read and update them.

server_setup.py           what a strategy wants of its servers
connect.py                which rank holds which shard, and the clients of the workers
shard.py                  the state and the decisions of one shard; clock_table.py, pending_gradients.py: parts of it
shard_client.py           what a worker can do with a shard
shared_memory_shard.py    ... in the memory of its host
remote_shard.py           ... by messages; shard_server.py: the loop that answers them
replication.py            two servers for each shard
aggregation.py            groups of workers that push one sum
embeddings/               rows of embedding tables
"""

from manyhands.core.sharding import Sharding, check_servers
from manyhands.servers.connect import connect, read_outcome, serve, waves
from manyhands.servers.server_setup import AggregationTree, ServerSetup
from manyhands.servers.shard_client import Pushed, ShardClient

__all__ = [
    "AggregationTree",
    "Pushed",
    "ServerSetup",
    "ShardClient",
    "Sharding",
    "check_servers",
    "connect",
    "read_outcome",
    "serve",
    "waves",
]
