"""Views of a run from outside: its status, an endpoint for Prometheus, and a picture of its metrics.

`JobStatus` is assembled from the records that replicas publish (`membership.status`), and prints a table or JSON.
`serve` offers the same numbers to Prometheus, on threads of its server. `plot_run` draws the file that Lightning's
`CSVLogger` wrote. Nothing here takes part in training. The modules `status` and `plot` are independent of each other.
"""
