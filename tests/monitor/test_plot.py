from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from lightning_async.monitor.plot import _panels, plot_run, read_metrics

LOGGED = """\
averaging/hidden_share,averaging/rounds,averaging/samples/0,averaging/samples/1,epoch,step,train/loss,val/loss,val/accuracy
,,,,0,4,3.5,,
0.9,1,128,96,0,8,,,
,,,,0,8,2.5,,
,,,,0,9,,2.4,0.35
1.0,2,256,160,0,16,nan,,
,,,,0,16,2.25,,
"""


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.csv"
    path.write_text(LOGGED)
    return path


def test_rows_of_different_metrics_become_one_series_each(metrics: Path):
    series = read_metrics(metrics)
    assert series["train/loss"] == ([4, 8, 16], [3.5, 2.5, 2.25])
    assert series["val/accuracy"] == ([9], [0.35])
    assert series["averaging/rounds"] == ([8, 16], [1.0, 2.0])
    assert "step" not in series
    assert "epoch" not in series


def test_metrics_that_end_alike_share_a_panel_and_ours_come_last(metrics: Path):
    panels = _panels(read_metrics(metrics))
    assert [sorted(lines) for lines in panels.values()] == [
        ["train/loss", "val/loss"],
        ["val/accuracy"],
        ["averaging/rounds"],
        ["averaging/hidden_share"],
        ["averaging/samples/0", "averaging/samples/1"],
    ]


def test_the_picture_is_written_where_it_was_asked_for(metrics: Path, tmp_path: Path):
    out = tmp_path / "new folder" / "run.png"
    assert plot_run(metrics, out) == out
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"), [("a,b\n1,2\n", "'step'"), ("", "'step'"), ("epoch,step\n0,1\n", "no metric")]
)
def test_a_file_that_is_no_run_is_refused(text: str, message: str, tmp_path: Path):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"metrics_csv.*{message}"):
        plot_run(path, tmp_path / "run.png")


def test_a_run_that_logged_nothing_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"absent\.csv"):
        plot_run(tmp_path / "absent.csv", tmp_path / "run.png")


def test_without_matplotlib_the_error_names_the_extra(metrics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without_matplotlib(name: str, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"lightning-async\[plot\]"):
        plot_run(metrics, tmp_path / "run.png")
