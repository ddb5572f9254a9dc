"""The strategies that a user passes to the Trainer, and how a replica trains under each of them.

- `AsyncAveragingStrategy`, `AsyncGradientStrategy` and `ParameterServerStrategy` are the public classes. They derive
  from `AsyncStrategy` (sync points, sessions), and `AsyncStrategy` from `ReplicatedStrategy` (ranks, one model,
  collectives).
- `FitSessions` begins and ends the sessions of a fit; a session is training over one connection of the ranks. A
  `Session` builds engine, averager and step runner.
- `LocalSteps`, `WindowSteps` and `PushSteps` are the step runners: the optimizer steps of each strategy.
- `JoinCoordinator` and `JoiningRank` are the two sides of a join, by which a new rank enters a running training;
  `RankMap` holds the live ranks and their numbers.
- `ServerHandle` and `Servers` find, start and end parameter servers; `ServerOptions` holds the rarer settings of
  servers.

Threads: everything runs on the training thread, with these exceptions. A join is prepared on one thread, and its
connection is closed on another. A worker's requests to servers have a thread of their own. The engine's thread reports
lost ranks.

Read base and async_strategy first, then session and local_steps; the other step runners; join and server modules last.
"""
