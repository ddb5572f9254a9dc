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


def test_settings_that_callbacks_log_do_not_push_out_the_loss() -> None:
    names = ["accumulation/batches", "accumulation/lr_factor", *(f"lr-AdamW/pg{group}{end}" for group in (1, 2)
             for end in ("", "-momentum", "-weight_decay")), "train/acc_epoch", "train/loss_step",
             *(f"val/{name}/dataloader_idx_{loader}" for name in ("acc", "loss") for loader in (0, 1))]  # fmt: skip
    panels = _panels({name: ([1], [1.0]) for name in names})
    assert {title: len(lines) for title, lines in panels.items()} == {"acc": 3, "loss": 3, "batches": 1, "lr_factor": 1}
    panels = _panels({name: ([1], [1.0]) for name in names[2:]})
    assert {title: len(lines) for title, lines in panels.items()} == {
        "acc": 3, "loss": 3, "learning rate": 2, "momentum": 2
    }  # fmt: skip


def test_metrics_that_end_alike_share_a_panel_and_ours_come_last(metrics: Path):
    panels = _panels(read_metrics(metrics))
    assert [sorted(lines) for lines in panels.values()] == [
        ["train/loss", "val/loss"],
        ["val/accuracy"],
        ["averaging/rounds"],
        ["averaging/hidden_share"],
        ["averaging/samples/0", "averaging/samples/1"],
    ]


SERVED = """\
epoch,gradients/norm,servers/bytes,servers/hidden_share,servers/idle_s,servers/lag,servers/mean_lag,servers/pulled_bytes,\
servers/pulls,servers/pushes,servers/samples,servers/failed_rounds,servers/version,servers/waited_s,step,train/loss
0,,4096,0.5,0.0,3,2.5,8192,10,10,320,0,21,0.2,10,1.5
0,0.7,,,,,,,,,,,,,12,1.25
0,,8192,0.7,0.1,1,2.0,16384,20,20,640,0,44,0.3,20,1.0
"""
WINDOWS = """\
epoch,gradients/batches_in_window,gradients/bytes,gradients/hidden_share,gradients/idle_s,gradients/window_s,gradients/windows,step
0,4.0,4096,0.5,0.0,0.01,5,5
"""


@pytest.mark.parametrize(
    ("logged", "titles"),
    [
        (
            SERVED,
            {
                "norm": ["gradients/norm"],
                "loss": ["train/loss"],
                "version that was pulled last": ["servers/version"],
                "pushes and pulls": ["servers/pulls", "servers/pushes"],
                "lag of pushes, in updates": ["servers/lag", "servers/mean_lag"],
                "share of communication hidden": ["servers/hidden_share"],
                "seconds idle": ["servers/idle_s", "servers/waited_s"],
                "bytes sent, and pulled": ["servers/bytes", "servers/pulled_bytes"],
                "samples": ["servers/samples"],
            },
        ),
        (
            WINDOWS,
            {
                "windows of gradients reduced": ["gradients/windows"],
                "share of communication hidden": ["gradients/hidden_share"],
                "seconds per window": ["gradients/window_s"],
                "batches in a window": ["gradients/batches_in_window"],
                "seconds idle": ["gradients/idle_s"],
                "bytes sent, and pulled": ["gradients/bytes"],
            },
        ),
    ],
    ids=["servers", "windows"],
)
def test_servers_and_windows_have_panels_of_their_own(logged: str, titles: dict[str, list[str]], tmp_path: Path):
    path = tmp_path / "metrics.csv"
    path.write_text(logged)
    panels = _panels(read_metrics(path))
    assert {title: sorted(lines) for title, lines in panels.items()} == titles
    assert list(panels) == list(titles)
    assert plot_run(path, tmp_path / "run.png").stat().st_size > 0


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
