"""Averaging as a component of the engine: replicas exchange messages every few steps, and merge their mean.

The training thread packs a snapshot of its parameters and trains on. Meanwhile the engine's thread turns the snapshot
into the averaging rule's message, and averages the messages of all replicas. The rule turns the mean message into the
target, the parameters to which replicas move. Then the training thread moves its parameters by the difference between
the target and the snapshot, so that the steps taken since the snapshot are kept.

- `BackgroundAverager` is used by the training thread.
- `AveragingComponent` plans the rounds. Their types are `AveragingRound`, which also moves the parameters, and
  `AnchorRound`.
- `RuleState` holds the rule's state, which is equal on all replicas. `RoundTrends` tells how far replicas are apart.
- `AveragedState` finds the tensors of optimizer state that can be averaged.

Read the modules in this sequence: averager, rule_state, rounds, optimizer_state.
"""
