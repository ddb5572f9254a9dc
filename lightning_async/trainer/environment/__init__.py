"""The environment of a rank: its launcher, its rank and world size, and the settings that ranks compare.

`MPIRunEnvironment` reads the ranks of mpirun and horovodrun. `RenumberedEnvironment` and `JoiningEnvironment` replace a
launcher's environment when ranks change, and `StableIds` are the ids that outlive such changes. `ProcessLauncher` and
`ScriptLauncher` start the other ranks if no external launcher did. `TrainerSettings` compares the settings of all ranks
before the first round.

`ScriptLauncher` starts one thread, which watches the processes that it has started. Read `environments` first, then
`settings` and `subprocess_launcher`.
"""
