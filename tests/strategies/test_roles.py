"""Who trains and who serves: by number, by the environment's word, by arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_async.strategies.placement import ServerRoles
from lightning_async.trainer.role_environments import DMLCEnvironment, TFConfigEnvironment, find_roles

CLUSTER = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4", "[::1]:5"]}
DMLC = {
    "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "2", "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000", "DMLC_WORKER_ID": "1",
}  # fmt: skip


class Ranks:
    """What a launcher says."""

    main_address, main_port = "127.0.0.1", 29500

    def __init__(self, rank: int, size: int, started_as: int | None = None) -> None:
        self._rank, self._size = rank, size
        if started_as is not None:
            self.started_as = started_as

    def global_rank(self) -> int:
        return self._rank

    def world_size(self) -> int:
        return self._size


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("TF_CONFIG", "TORCHELASTIC_RUN_ID", "HOROVOD_RANK", "DMLC_SERVER_ID", *DMLC):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def tf_config(kind: str, index: int = 0, cluster: Any = CLUSTER) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def set_all(shell: pytest.MonkeyPatch, variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        shell.delenv(name, raising=False) if value is None else shell.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "role"),
    [
        (Ranks(0, 5), ("worker", 0)),
        (Ranks(2, 5), ("worker", 2)),
        (Ranks(3, 5), ("server", 0)),
        (Ranks(4, 5), ("server", 1)),
        (Ranks(4, 5, started_as=1), ("worker", 1)),
        (Ranks(4, 5, started_as=3), ("server", 0)),
        (Ranks(5, 5), ("worker", 5)),
    ],
)
def test_the_last_ranks_serve(environment: Ranks, role: tuple[str, int], shell: pytest.MonkeyPatch) -> None:
    roles = ServerRoles("Strategy", "dedicated", 2, None)
    assert roles.environment(environment) is environment
    assert (roles.num_serving, roles.of(environment)) == (2, role)
    assert roles.reached_at(environment, num_nodes=1) == (None, 0)
    assert roles.reached_at(environment, num_nodes=2) == ("127.0.0.1", 0)
    assert not roles.is_alone(1)


@pytest.mark.parametrize("placement", [None, "colocated"])
def test_all_ranks_train(placement: Any, shell: pytest.MonkeyPatch) -> None:
    roles = ServerRoles("Strategy", placement, 2, None)
    roles.environment(Ranks(1, 2))
    assert not roles.dedicated
    assert (roles.num_serving, roles.of(Ranks(1, 2))) == (0, ("worker", 1))
    assert roles.of(Ranks(2, 2)) == ("worker", 2), "it comes with a number that nobody had"
    assert roles.is_alone(1) and not roles.is_alone(2)
    assert not ServerRoles("Strategy", placement, None, "a:1").is_alone(1)


def test_ps_lites_variables(shell: pytest.MonkeyPatch) -> None:
    roles = ServerRoles("Strategy", None, None, None)
    set_all(shell, DMLC)
    environment = roles.environment(Ranks(0, 1))
    assert isinstance(environment, DMLCEnvironment)
    assert (environment.global_rank(), environment.world_size()) == (1, 3)
    assert (environment.main_address, environment.main_port) == ("10.0.0.1", 9000)
    assert roles.dedicated and roles.num_servers == 2 and roles.num_serving == 0
    assert roles.of(environment) == ("worker", 1)
    for role, number, rank in (("server", 1, 4), ("scheduler", 0, 5)):
        set_all(shell, {"DMLC_ROLE": role, "DMLC_SERVER_ID": "1"})
        environment = roles.environment(Ranks(0, 1))
        assert roles.of(environment) == (role, number)
        assert environment.global_rank() == rank


def test_arguments_win(shell: pytest.MonkeyPatch) -> None:
    set_all(shell, DMLC)
    beside = ServerRoles("Strategy", "colocated", None, None)
    assert isinstance(beside.environment(Ranks(0, 1)), Ranks)
    fewer = ServerRoles("Strategy", None, 1, None)
    fewer.environment(Ranks(0, 1))
    assert fewer.num_servers == 1
    elsewhere = ServerRoles("Strategy", None, None, "a:1")
    elsewhere.environment(Ranks(0, 1))
    assert not elsewhere.dedicated


@pytest.mark.parametrize(
    ("kind", "index", "role", "rank"),
    [
        ("chief", 0, ("worker", 0), 0),
        ("worker", 0, ("worker", 1), 1),
        ("worker", 1, ("worker", 2), 2),
        ("ps", 1, ("server", 1), 4),
    ],
)
def test_tensorflows_variable(
    kind: str, index: int, role: tuple[str, int], rank: int, shell: pytest.MonkeyPatch
) -> None:
    shell.setenv("TF_CONFIG", tf_config(kind, index))
    roles = ServerRoles("Strategy", "dedicated", None, None)
    environment = roles.environment(Ranks(0, 1))
    assert isinstance(environment, TFConfigEnvironment)
    assert (environment.global_rank(), environment.world_size()) == (rank, 3)
    assert (environment.main_address, environment.main_port) == ("a", 1)
    assert (roles.of(environment), roles.num_servers) == (role, 2)
    assert environment.listens_at == (5 if kind == "ps" else 0)


def test_tensorflows_variable_without_servers_says_nothing(shell: pytest.MonkeyPatch) -> None:
    """Kubeflow and Vertex set it for every job."""
    shell.setenv("TF_CONFIG", tf_config("worker", 0, {"worker": ["a:1", "b:2"]}))
    assert find_roles() is None


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"DMLC_ROLE": "chief"}, "DMLC_ROLE='chief'"),
        ({"DMLC_NUM_WORKER": None}, "DMLC_NUM_WORKER=''"),
        ({"DMLC_NUM_SERVER": "0"}, "DMLC_NUM_SERVER='0'"),
        ({"DMLC_PS_ROOT_URI": None}, "DMLC_PS_ROOT_URI"),
        ({"DMLC_PS_ROOT_PORT": "http"}, "DMLC_PS_ROOT_PORT='http'"),
        ({"DMLC_WORKER_ID": "3"}, "DMLC_NUM_WORKER is 3"),
        ({"DMLC_WORKER_ID": "-1"}, "DMLC_WORKER_ID='-1'"),
    ],
)
def test_variables_of_ps_lite_that_cannot_be(
    variables: dict[str, str | None], words: str, shell: pytest.MonkeyPatch
) -> None:
    set_all(shell, {**DMLC, **variables})
    with pytest.raises(ValueError, match=re.escape(words)):
        ServerRoles("Strategy", None, None, None).environment(Ranks(0, 1)).global_rank()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (tf_config("evaluator"), "this task is an evaluator"),
        (tf_config("master"), "this task is a 'master'"),
        (tf_config("ps", 2), "this task is ps 2"),
        (tf_config("ps", 0, {"ps": ["a:1"]}), "no chief and no worker"),
        (tf_config("ps", 0, {"ps": ["a"], "worker": ["b:1"]}), "'a' must be HOST:PORT"),
        ("{", "must be JSON"),
        ("[]", "must be JSON"),
    ],
)
def test_a_variable_of_tensorflow_that_cannot_be(told: str, words: str, shell: pytest.MonkeyPatch) -> None:
    shell.setenv("TF_CONFIG", told)
    with pytest.raises(ValueError, match=re.escape(words)):
        find_roles()


@pytest.mark.parametrize("other", ["TORCHELASTIC_RUN_ID", "HOROVOD_RANK"])
def test_two_answers_to_who_this_is(other: str, shell: pytest.MonkeyPatch) -> None:
    set_all(shell, {**DMLC, other: "1"})
    with pytest.raises(RuntimeError, match=f"DMLC_ROLE beside {other}"):
        find_roles()
