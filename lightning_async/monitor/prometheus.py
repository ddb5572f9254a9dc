"""The numbers of ``lightning-async status`` for Prometheus: an endpoint beside the job, which asks its store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning_async.monitor.status import Job, Replica

__all__ = ["serve"]

_GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "training": ("1 where the replica takes part.", lambda r: float(r.trains)),
    "heard_ago_seconds": ("Since it has said something.", lambda r: r.heard_ago_s),
    "generation": ("Of the groups that it is in.", lambda r: r.standing.generation),
    "epoch": ("Of its training.", lambda r: r.standing.epoch),
    "steps": ("Optimizer steps that it has taken.", lambda r: r.standing.step),
    "steps_per_second": ("Over the last seconds.", lambda r: r.standing.steps_per_s if r.trains else 0.0),
    "lag_steps": ("Behind the replica that has taken most.", lambda r: r.lag),
    "samples": ("That it has seen.", lambda r: r.standing.samples),
    "rounds": ("That it has seen committed.", lambda r: r.standing.rounds),
    "round_seconds": ("What a round's exchange takes, on average.", lambda r: r.standing.round_s),
    "round_ago_seconds": ("Since the last one; -1 where there was none.", lambda r: _ago(r)),
    "failed_rounds": ("That were repeated.", lambda r: r.standing.failed_rounds),
    "hidden_share": ("Of communication.", lambda r: r.standing.hidden_share),
    "idle_seconds": ("At gates.", lambda r: r.standing.idle_s),
    "sent_bytes": ("By it.", lambda r: r.standing.sent_bytes),
    "restarts": ("Of this rank, together with the others or alone.", lambda r: r.restarts),
}


def serve(look: Callable[[], Sequence[Job]], host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serve what ``look`` finds, at each request, on threads of its own; the port, and what ends it.

    Args:
        look: the jobs, as they stand.
        host: where to listen; "127.0.0.1" for this host alone.
        port: 0 for one that is free.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: the port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("an endpoint for Prometheus needs: pip install 'lightning-async[prometheus]'") from error

    registry: Any = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(look))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close


class _Collector:
    """See https://prometheus.github.io/client_python/collector/custom/."""

    def __init__(self, look: Callable[[], Sequence[Job]]) -> None:
        self._look = look

    def describe(self) -> list[Any]:
        """Nothing is asked of the store before somebody wants to know."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily  # pyright: ignore[reportMissingImports]

        jobs = self._look()
        for name, (about, number) in _GAUGES.items():
            family = GaugeMetricFamily(f"lightning_async_{name}", about, labels=["store", "rank"])
            for job in jobs:
                for replica in job.replicas:
                    family.add_metric([job.where, replica.standing.name], number(replica))
            yield family


def _ago(replica: Replica) -> float:
    ago = replica.standing.round_ago_s
    return ago + replica.heard_ago_s if ago >= 0.0 else -1.0
