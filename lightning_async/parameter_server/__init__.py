"""Parameter servers and their clients: servers hold the weights, and workers push gradients to them.

A server holds one shard of the weights, in memory that outlives the server's process. A worker pulls weights, computes
gradients, and pushes them. An optimizer on the server applies each push once, whichever process dies.

- `Server` answers workers, with one thread for each worker and one lock around its `Store`.
- `ServerProcess` starts a supervisor. The supervisor starts the server process, and starts it again when it is killed.
- `Worker` pulls weights into a model's parameters and pushes gradients, through a `Client`. It uses one table of the
  servers: the weights and the optimizer state of one group of parameters.
- `ParameterGroups` holds one `Worker` for each group of parameters.

A worker sends its requests from one thread at a time. A server process has a main thread that accepts connections, a
thread for each connection, and, if it takes snapshots, a thread for the snapshots of each table.

Read partition, client and worker first, then server, store and update, and last process and supervisor.
"""
