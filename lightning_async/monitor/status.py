"""The status of a job, assembled from the records that its replicas publish."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_async.membership.generation import in_order
from lightning_async.membership.status import ENDED, FAILED, StatusRecord

LOST = "lost"
SILENT = "silent"
# A replica publishes a record each second. Without one for this long it is stopped, dead, or cut off.
_SILENT_S = 4.0


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """The status of one replica."""

    standing: StatusRecord  # its last record
    state: str  # what it does; `LOST` if the others continue without it, `SILENT` if it publishes nothing
    heard_ago_s: float  # seconds since its last record
    lag: int  # number of steps behind the replica that has taken most
    restarts: int  # restarts of this rank, with the others or alone

    @property
    def trains(self) -> bool:
        return self.state not in (LOST, SILENT, ENDED, FAILED)

    @property
    def round_ago_s(self) -> float:
        """Seconds since the replica's last round; -1 if there was none."""
        ago = self.standing.round_ago_s
        return ago + self.heard_ago_s if ago >= 0.0 else -1.0


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The status of all replicas of a job, for a table, JSON or Prometheus."""

    where: str
    replicas: tuple[ReplicaStatus, ...]

    @classmethod
    def of(cls, where: str, standings: Sequence[StatusRecord], now: float) -> JobStatus:
        """Return the status of the job whose store is at the address ``where``, from the records of its processes.

        Args:
            where: Address of the job's store.
            standings: Last record of each process, in the order in which the processes started.
            now: Seconds since 1970. If hosts' clocks differ, durations are wrong by the difference.
        """
        last = {standing.name: standing for standing in standings}
        newest = max(((s.run, s.generation) for s in last.values()), default=(0, 0))
        members = {name for s in last.values() if (s.run, s.generation) == newest for name in s.members}
        here = {name for name, s in last.items() if now - s.at < _SILENT_S and name in members}
        most = max((last[name].step for name in here), default=0)
        replicas = []
        for name in in_order(last):
            standing = last[name]
            lives = {s.process for s in standings if s.name == name}
            silent = now - standing.at >= _SILENT_S
            state = standing.state
            if state not in (ENDED, FAILED) and (silent or name not in members):
                state = LOST if name not in members else SILENT
            replicas.append(
                ReplicaStatus(
                    standing=standing, state=state, heard_ago_s=max(0.0, now - standing.at),
                    lag=max(0, most - standing.step) if name in here else 0,
                    restarts=standing.restarts + len(lives) - 1,
                )
            )  # fmt: skip
        return cls(where=where, replicas=tuple(replicas))

    @property
    def generation(self) -> int:
        return max((replica.standing.generation for replica in self.replicas if replica.trains), default=0)

    @property
    def training(self) -> int:
        return sum(replica.trains for replica in self.replicas)

    def table(self) -> str:
        title = f"{self.where}: {self.training} of {len(self.replicas)} replicas train, in generation {self.generation}"
        if not self.replicas:
            return f"{self.where}: no replica has trained yet"
        rows = [_HEAD, *(_cells(replica) for replica in self.replicas)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        left = (0, 2)
        lines = [
            "  ".join(
                cell.ljust(width) if index in left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([title, *(line.rstrip() for line in lines)])

    def json(self) -> str:
        replicas = [
            {
                **asdict(replica.standing), "state": replica.state, "heard_ago_s": round(replica.heard_ago_s, 3),
                "lag": replica.lag, "restarts": replica.restarts,
            }
            for replica in self.replicas
        ]  # fmt: skip
        return json.dumps(
            {"store": self.where, "generation": self.generation, "training": self.training, "replicas": replicas}
        )


_HEAD = ("rank", "now", "state", "epoch", "step", "steps/s", "lag", "rounds", "last", "took", "failed", "hidden",
         "restarts", "process")  # fmt: skip


def _cells(replica: ReplicaStatus) -> tuple[str, ...]:
    standing = replica.standing
    takes_part = replica.trains
    state = replica.state
    if state in (LOST, SILENT):
        state = f"{state} ({replica.heard_ago_s:.0f} s)"
    elif takes_part and standing.slow:
        state = f"{state} ({standing.slow})"
    last = f"{replica.round_ago_s:.1f} s" if replica.round_ago_s >= 0.0 else "-"
    return (
        standing.name,
        str(standing.rank) if takes_part else "-",
        state,
        str(standing.epoch),
        str(standing.step),
        f"{standing.steps_per_s:.1f}" if takes_part else "-",
        str(replica.lag) if takes_part else "-",
        str(standing.rounds),
        last,
        f"{1e3 * standing.round_s:.0f} ms",
        str(standing.failed_rounds),
        f"{100 * standing.hidden_share:.0f}%",
        str(replica.restarts),
        f"{standing.process} on {standing.host}",
    )


_GAUGES: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "training": ("Whether the replica takes part in training (1) or not (0).", lambda r: float(r.trains)),
    "heard_ago_seconds": ("Seconds since its last record.", lambda r: r.heard_ago_s),
    "generation": ("Generation of its process groups.", lambda r: r.standing.generation),
    "epoch": ("Epoch of its training.", lambda r: r.standing.epoch),
    "steps": ("Optimizer steps that it has taken.", lambda r: r.standing.step),
    "steps_per_second": ("Optimizer steps per second, of late.", lambda r: r.standing.steps_per_s if r.trains else 0.0),
    "lag_steps": ("Steps behind the replica that has taken most.", lambda r: r.lag),
    "samples": ("Samples that it has seen.", lambda r: r.standing.samples),
    "rounds": ("Rounds that it has seen committed.", lambda r: r.standing.rounds),
    "round_seconds": ("Mean seconds of a round's exchange.", lambda r: r.standing.round_s),
    "round_ago_seconds": ("Seconds since its last round; -1 if there was none.", lambda r: r.round_ago_s),
    "failed_rounds": ("Rounds that were repeated.", lambda r: r.standing.failed_rounds),
    "hidden_share": ("Share of communication that is hidden.", lambda r: r.standing.hidden_share),
    "idle_seconds": ("Seconds of waiting at sync points.", lambda r: r.standing.idle_s),
    "sent_bytes": ("Bytes that it has sent.", lambda r: r.standing.sent_bytes),
    "restarts": ("Restarts of this rank, with the others or alone.", lambda r: r.restarts),
}


def serve(look: Callable[[], Sequence[JobStatus]], host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serve a job's status to Prometheus; return the port, and a function that stops the server.

    Args:
        look: Function that returns the status. It is called at each request, on the request's thread.
        host: Address at which to listen.
        port: Port; 0: the system chooses a free one.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: The port is in use.
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
    """A collector for Prometheus; see https://prometheus.github.io/client_python/collector/custom/."""

    def __init__(self, look: Callable[[], Sequence[JobStatus]]) -> None:
        self._look = look

    def describe(self) -> list[Any]:
        """Return no metrics, so that the store is read at requests only, not when the collector is registered."""
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
