"""Parameter servers and their clients: servers hold the weights, and workers push gradients to them.

A server holds one shard of the weights, in memory that outlives its process. A worker pulls weights, computes
gradients, and pushes them; an optimizer on the server applies each push once, whichever process dies.

- `Server` answers workers, with one thread for each worker and one lock around its `Store`.
- `ServerProcess` starts a supervisor process, which starts the server process, and starts it again when it is killed.
- `Worker` pulls weights into a model's parameters and pushes gradients, through a `Client`. The weights of one `Worker`
  are one table on the servers.
- `ParameterGroups` holds one `Worker` for each group of parameters.

Processes and threads: the worker sends its requests from one thread at a time; the server process has a thread for
calls, one for each worker, and one for snapshots.

Read partition, client and worker first, then server, store and update, and last process and supervisor.
"""
