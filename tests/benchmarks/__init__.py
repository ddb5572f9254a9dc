"""Speed of asynchronous averaging against its peers: `python -m tests.benchmarks.averaging --out DIR`."""
