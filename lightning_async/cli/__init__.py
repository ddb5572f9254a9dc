"""The command line: ``lightning-async doctor | build-horovod | launch | serve | checkpoint | status``.

Each command is a module of this folder (Horovod's build is in its own folder) with a function ``main``, which parses
arguments, calls the package, and returns the exit code. `main` in main.py imports only the module of the command that
was given, so that commands without torch start fast.

- launch starts the ranks of a training, and serve starts parameter servers, on this host.
- status shows a running job, and checkpoint works on a directory of checkpoints.
- doctor reports what is installed.

first_process comes before all of them: in a container, the console script may be PID 1 and has duties then. There are
no threads, except for the HTTP server of status. Read main first, then the command that you need.
"""
