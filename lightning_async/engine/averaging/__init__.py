"""Averaging as a component of the engine: replicas exchange messages every few steps, and merge their mean.

The training thread packs a snapshot of its parameters and trains on. Meanwhile the engine's thread turns the snapshot
into the rule's message, averages all messages, and lets the rule make a target of the mean. Then the training thread
moves its parameters by the difference between target and snapshot, so that the steps in between are kept.

- `BackgroundAverager` is the training thread's side, and `Merger` its last step.
- `AveragingComponent` plans the rounds, of the types `AveragingRound`, `ConsensusRound` and `AnchorRound`.
- `WorkLedger` counts each replica's work; `RuleState` holds the rule's state, equal on all replicas.
- `RunSummary` holds the totals of a run; `AveragedState` finds the optimizers' state that can be averaged.

Read averager first, then rule_state and rounds, and last report and optimizer_state.
"""
