"""The console script itself."""

from __future__ import annotations

import pytest

from lightning_async.cli.main import COMMANDS, main


def test_without_a_command_one_is_asked_for_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("error: the following arguments are required: command\n")


def test_help_names_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and all(f"  {name} " in text for name in COMMANDS)
