"""The example: its data and model, and one short run of it as a user would start it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

import examples.char_lm
from examples.char_lm import CharData, CharLM, Windows, parse, read_text
from lightning_async.monitor.plot import read_metrics
from tests.support import ROOT, run_ranks


def test_the_text_is_real_and_the_same_every_time():
    text = read_text()
    assert len(text) > 700_000
    assert "An identifier" in text
    assert text == read_text()


def test_its_docstring_shows_options_that_it_has():
    shown = [
        line.split("char_lm.py")[1] for line in (examples.char_lm.__doc__ or "").splitlines() if "char_lm.py" in line
    ]
    assert len(shown) == 3
    for options in shown:
        parse(shlex.split(options))


def test_windows_cover_the_tokens_and_targets_are_the_next_ones():
    windows = Windows(torch.arange(21), context=4, stride=4)
    assert len(windows) == 5
    inputs, targets = windows[4]
    assert inputs.tolist() == [16, 17, 18, 19]
    assert targets.tolist() == [17, 18, 19, 20]
    with pytest.raises(IndexError):
        windows[5]


def test_training_and_validation_text_are_apart():
    data = CharData(val_windows=8)
    assert len(data.train_tokens) + len(data.val_tokens) == len(read_text())
    assert 0.08 < len(data.val_tokens) / len(data.train_tokens) < 0.15
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 128)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_model_never_looks_ahead():
    torch.manual_seed(0)
    model = CharLM(50, context=16).eval()
    for parameter in model.parameters():  # blocks start as the identity: give attention something to say
        torch.nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 50, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])
    assert 1e6 < sum(parameter.numel() for parameter in CharLM(105).parameters()) < 5e6


@pytest.mark.processes
@pytest.mark.parametrize(
    "given",
    [["--strategy=ddp"], ["--strategy=async_averaging", "--beside-one"], ["--rule=diloco", "--compression=int8"]],
    ids=["ddp", "async_averaging", "compressed"],
)
def test_a_short_run_ends_with_numbers_and_a_picture(given: list[str], tmp_path: Path):
    args = [*given, "--devices=2", "--max-steps=10", "--sync-every=4", f"--out={tmp_path / 'out'}"]
    (run,) = run_ranks(ROOT / "examples/char_lm.py", 1, args=args, timeout=200, launched=False)
    assert "Next character right:" in run.stdout
    pictures = ["rounds.png", *(["run.png"] if "--beside-one" in given else [])]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.png")) == pictures
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    files = list((tmp_path / "out").glob("**/metrics.csv"))
    assert len(files) == len(pictures)
    for file in files:
        series = read_metrics(file)
        assert {"train/loss", "train/accuracy", "val/loss", "val/accuracy", "val/seconds"} <= set(series)
