"""The example for Kubernetes: by the types and names of its API, and with processes here in the place of its pods.

On no cluster: what the Job's controller makes of it is not tested.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import TCPStore

from lightning_async.membership.signing import SECRET
from tests.examples.test_clusters import check_replica
from tests.support import ROOT, Process, free_port, shell_environment, start_script

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SCHEMA = json.loads(Path(__file__).with_name("kubernetes.schema.json").read_text())["definitions"]
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
MANIFEST = list(yaml.safe_load_all((ROOT / "examples/kubernetes.yaml").read_text()))


def problems(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """What does not hold of JSON Schema's words that ours has."""
    if "$ref" in schema:
        yield from problems(value, SCHEMA[schema["$ref"].rpartition("/")[2]], where)
        return
    wanted = schema.get("type", [])
    kinds = tuple(TYPES[name] for name in ([wanted] if isinstance(wanted, str) else wanted))
    if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        yield f"{where}: {value!r} is no {wanted}"
    elif isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        yield from (f"{where}: no {name}" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            if name not in known and others is False:
                yield f"{where}: {name} is unknown"
            else:
                yield from problems(each, known.get(name, others or {}), f"{where}.{name}")
    elif isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            yield f"{where}: {len(value)} of them"
        for number, each in enumerate(value):
            yield from problems(each, schema["items"], f"{where}[{number}]")
    elif isinstance(value, int):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            yield f"{where}: {value} is out of range"
    elif not re.search(schema.get("pattern", ""), value):
        yield f"{where}: {value!r} is not as {schema['pattern']}"
    if value not in schema.get("enum", [value]):
        yield f"{where}: {value!r} is none of {schema['enum']}"


def all_problems(documents: list[Any]) -> list[str]:
    return [each for document in documents for each in problems(document, SCHEMA[document["kind"]], document["kind"])]


def part(kind: str, name: str, documents: list[Any] = MANIFEST) -> Any:
    (found,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def test_the_manifest_is_of_kubernetes_types():
    assert all_problems(MANIFEST) == []
    kinds = [each["kind"] for each in MANIFEST]
    assert sorted(kinds) == ["Deployment", "Job", "Secret", "Service", "Service"]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("spec", "backoffLimitPerIndex"), "3", "Job.spec.backoffLimitPerIndex: '3' is no integer"),
        (("spec", "backoffLimitPerIndex"), True, "Job.spec.backoffLimitPerIndex: True is no integer"),
        (("spec", "succesPolicy"), {}, "Job.spec: succesPolicy is unknown"),
        (("spec", "completionMode"), "indexed", "Job.spec.completionMode: 'indexed' is none of"),
        (("spec", "successPolicy"), {"rules": []}, "Job.spec.successPolicy.rules: 0 of them"),
        (("spec", "template", "spec", "subdomain"), "Training", "Job.spec.template.spec.subdomain: 'Training' is not"),
        (("spec", "template", "spec"), {}, "Job.spec.template.spec: no containers"),
        (("spec", "completions"), -1, "Job.spec.completions: -1 is out of range"),
    ],
)
def test_the_schema_refuses(path: tuple[str, ...], value: object, problem: str):
    documents = deepcopy(MANIFEST)
    *inner, last = path
    place = part("Job", "training", documents)
    for name in inner:
        place = place[name]
    place[last] = value
    (found,) = all_problems(documents)
    assert found.startswith(problem)


def test_its_parts_are_of_each_other():
    """What the API asks beyond types, and what parts say of others."""
    job, secret = part("Job", "training"), part("Secret", "training")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], pod["restartPolicy"], spec["podReplacementPolicy"]) == (
        "Indexed",
        "Never",
        "Failed",
    )
    assert spec["completions"] == spec["parallelism"] == 3
    assert spec["backoffLimitPerIndex"] == 3
    assert spec["successPolicy"]["rules"] == [{"succeededCount": 1}], "no pod must be there at the end"
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] == "Ignore"
        assert rule.keys() - {"action"} in ({"onExitCodes"}, {"onPodConditions"})
    names, store = part("Service", "training"), part("Service", "training-store")
    assert names["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (names["spec"]["clusterIP"], names["metadata"]["name"]) == ("None", pod["subdomain"])
    deployment = part("Deployment", "training-store")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert store["spec"]["selector"] == deployment["selector"]["matchLabels"] == labels
    assert deployment["template"]["spec"]["containers"][0]["ports"] == [{"containerPort": 29500}]
    assert store["spec"]["ports"] == [{"port": 29500}]
    variables = {each["name"]: each for each in pod["containers"][0]["env"]}
    reference = variables[SECRET]["valueFrom"]["secretKeyRef"]
    assert (reference["name"], [reference["key"]]) == (secret["metadata"]["name"], [*secret["stringData"]])
    assert variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == INDEX


def variables_of(index: int) -> dict[str, str]:
    """What the pod of this index finds."""
    environment = part("Job", "training")["spec"]["template"]["spec"]["containers"][0]["env"]
    told = {INDEX: str(index)}
    given = {each["name"]: each["value"] for each in environment if "value" in each}
    sources = {each["name"]: each["valueFrom"] for each in environment if "valueFrom" in each}
    given |= {name: told[each["fieldRef"]["fieldPath"]] for name, each in sources.items() if "fieldRef" in each}
    return given | {name: "known to all" for name, each in sources.items() if "secretKeyRef" in each}


@pytest.mark.parametrize("index", range(3))
def test_the_pods_know_who_they_are(index: int, monkeypatch: pytest.MonkeyPatch):
    check_replica(variables_of(index), index, "training-store", monkeypatch)


class Pods:
    """Processes with the commands and variables of the pods; only addresses are this host's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._until = time.monotonic() + 200
        (container,) = part("Deployment", "training-store")["spec"]["template"]["spec"]["containers"]
        python, *arguments = container["command"]
        assert python == "python"
        told = [each.replace("0.0.0.0", "127.0.0.1").replace("29500", str(self.port)) for each in arguments]
        self.store = subprocess.Popen([sys.executable, *told], env=shell_environment())
        self.processes: list[Process] = [self.start(index) for index in range(3)]

    def start(self, index: int) -> Process:
        (container,) = part("Job", "training")["spec"]["template"]["spec"]["containers"]
        assert container["command"] == ["python", "-u", "train.py"]
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "SLURM_SUBMIT_DIR": str(self.folder)}
        script = str(ROOT / "tests/examples/slurm_train.py")
        with (self.folder / f"out-{index}").open("ab") as out:
            return start_script([script], shell_environment({**variables_of(index), **own}), self.folder, out, out)

    def steps(self, index: int, process: int | None = None) -> list[tuple[int, int]]:
        """Replicas and step, in each step that this one, or this process, has taken."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"steps-{index}").read_text().split("\n")[:-1]
            taken = [tuple(map(int, line.split())) for line in lines]
            return [(size, step) for pid, size, step in taken if process in (None, pid)]
        return []

    def train(self, *indices: int, replicas: int) -> None:
        """Wait until these processes have trained with so many for five more steps."""
        for index in indices:
            pid = self.processes[index].pid
            taken = len(self.steps(index, pid))
            self.until(lambda i=index, p=pid, n=taken: [s for s, _ in self.steps(i, p)[n:]].count(replicas) >= 5)

    def until(self, true: Callable[[], bool]) -> None:
        while not true():
            said = "".join(f"--- {n}\n{(self.folder / f'out-{n}').read_text()[-3000:]}" for n in range(3))
            assert time.monotonic() < self._until, said
            assert self.store.poll() is None, "the store has ended"
            time.sleep(0.01)

    def ended(self) -> list[int]:
        """Who has told the store that it has ended in order, and is not to be waited for."""
        store: Any = TCPStore("127.0.0.1", self.port, None, False, timedelta(seconds=60), wait_for_workers=False)
        return [index for index in range(3) if store.check([f"lightning_async/assembly/ended/{index}"])]

    def codes(self) -> list[int | None]:
        self.until(lambda: all(process.poll() is not None for process in self.processes))
        return [process.poll() for process in self.processes]

    def close(self) -> None:
        for process in (*self.processes, self.store):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.mark.processes
def test_the_first_pod_is_killed_and_its_replacement_joins_and_where_all_were_told_to_go_they_begin_again(
    tmp_path: Path,
):
    pods = Pods(tmp_path)
    try:
        pods.train(0, 1, 2, replicas=3)
        pods.processes[0].kill()
        pods.train(1, 2, replicas=2)
        pods.processes[0].wait()
        pods.processes[0] = pods.start(0)
        pods.train(0, 1, 2, replicas=3)
        pods.processes[2].send_signal(signal.SIGTERM)  # its node is wanted: all save
        assert pods.codes() == [75, 75, 75]
        assert pods.ended() == []
        reached = [pods.steps(index)[-1][1] for index in range(3)]
        pods.processes[:] = [pods.start(index) for index in range(3)]
        pods.train(0, 1, 2, replicas=3)
        first = [pods.steps(index, pods.processes[index].pid)[0][1] for index in range(3)]
        assert [n - before for n, before in zip(first, reached, strict=True)] == [1, 1, 1]
        (tmp_path / "stop").touch()
        assert pods.codes() == [0, 0, 0]
        assert pods.ended() == [0, 1, 2]
    finally:
        pods.close()
