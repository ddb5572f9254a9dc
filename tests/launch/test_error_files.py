"""What ranks have died of: written as torch's own tools do, and read by the launcher."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure

from lightning_async.errors import PeerLost, StoreLost
from lightning_async.launch.process import ERROR_FILE, ErrorFiles
from lightning_async.launch.state_machine import STORE_LOST
from lightning_async.trainer.environment import subprocess_launcher
from lightning_async.trainer.environment.subprocess_launcher import note_end
from lightning_async.trainer.namespace import in_words


def fail(error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:
        note_end(caught)


def test_what_a_trainer_dies_of_is_read_here_and_by_torchs_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = ErrorFiles(tmp_path)
    told = files.begin(3)
    assert told == {ERROR_FILE: str(tmp_path / "rank-3.error.json")}
    monkeypatch.setenv(ERROR_FILE, told[ERROR_FILE])
    assert files.read(3) == ""
    fail(ValueError("no more\nsecond line"))
    assert files.read(3) == "ValueError: no more"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=told[ERROR_FILE])
    said = failure.error_file_data["message"]
    assert said["message"] == "ValueError: no more\nsecond line"
    assert "in fail\n    raise error" in said["extraInfo"]["py_callstack"]
    assert failure.timestamp > 0
    files.close()
    assert (tmp_path / "rank-3.error.json").exists()
    files.begin(3)
    assert files.read(3) == ""


def test_a_lost_peer_is_written_down_with_its_places_and_shown_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "file"))
    error = PeerLost("rank 1 is gone", (1,))
    fail(error)
    assert error.__traceback__ is None
    assert json.loads((tmp_path / "file").read_text())["message"]["message"] == "PeerLost: rank 1 is gone"


def test_a_script_that_ends_for_want_of_the_store_has_a_code_of_its_own_and_shows_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    assert subprocess_launcher.STORE_LOST == STORE_LOST == 69
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", before := lambda kind, value, traceback: shown.append(value))
    lost, others = StoreLost("the store does not answer"), [PeerLost("rank 1 is gone", (1,)), ValueError("no more")]
    for error in others:
        fail(error)
    assert sys.excepthook is before
    for _ in range(2):
        fail(lost)  # of a script that goes on with another run, too
    for error in others:
        sys.excepthook(type(error), error, None)
    with pytest.raises(SystemExit) as end:
        sys.excepthook(StoreLost, lost, None)
    assert (end.value.code, shown) == (69, [*others, lost])
    mine = sys.excepthook
    with monkeypatch.context() as later:  # as torch's, which shows what this has shown
        later.setattr(sys, "excepthook", lambda *what: mine(*what))
        sys.excepthook(StoreLost, lost, None)
        later.setattr(sys, "ps1", ">>> ", raising=False)
        later.setattr(sys, "excepthook", mine)
        sys.excepthook(StoreLost, lost, None)
    assert shown == [*others, lost, lost, lost]


@pytest.mark.parametrize("error", [SystemExit(75), KeyboardInterrupt()])
def test_one_that_is_told_to_end_dies_of_nothing(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "file"))
    fail(error)
    assert not (tmp_path / "file").exists()


def test_one_that_cannot_be_put_into_words_ends_the_rank_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "file"))
    fail(Mute())
    assert in_words(Mute()) == "Mute, which does not say why"


def test_where_no_module_can_be_read_any_more_the_error_stays_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "rank-0.error.json"))
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing.errors", None)  # as without descriptors
    fail(ValueError("too many open files"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", [None, "no/such/folder/file"])
def test_where_nothing_can_be_written_nothing_is(place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    if place is not None:
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / place))
    fail(ValueError("no more"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"message": "plain"}', "plain"),
        ('{"message": {"message": "inner"}}', "inner"),
        ('{"message": {"message": 7}}', ""),
        ('{"message": [1]}', ""),
        ("[]", ""),
        ('{"mess', ""),
        ("[" * 100_000, ""),
        (json.dumps({"message": "x" * 1000}), "x" * 300 + "..."),
        (json.dumps({"message": "\n"}), ""),
    ],
)
def test_whatever_is_there_is_read(text: str, read: str, tmp_path: Path):
    files = ErrorFiles(tmp_path)
    Path(files.begin(0)[ERROR_FILE]).write_text(text)
    assert files.read(0) == read


def test_without_a_directory_they_go_with_the_launcher(monkeypatch: pytest.MonkeyPatch):
    files = ErrorFiles(None)
    place = Path(files.begin(0)[ERROR_FILE])
    monkeypatch.setenv(ERROR_FILE, str(place))
    ErrorHandler().record_exception(ValueError("no more"))
    assert files.read(0) == "ValueError: no more"
    files.close()
    assert not place.parent.exists()
