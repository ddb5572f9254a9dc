"""The command line of `status`; what it shows is in tests/monitor, tests/launch and tests/strategies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from lightning_async.cli import status
from tests.support import ROOT, free_port


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "'nowhere' is no HOST:PORT."),
        ([":1234"], "':1234' is no HOST:PORT."),
        (["host:0"], "'host:0' is no HOST:PORT."),
        (["host:99999"], "'host:99999' is no HOST:PORT."),
        (["--watch", "0"], "--watch 0: must be above 0"),
        (["--prometheus", "http"], "'127.0.0.1:http' is no HOST:PORT."),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        status.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_store_that_nobody_keeps_is_named(capsys: pytest.CaptureFixture[str]):
    port = free_port()
    assert status.main([f"127.0.0.1:{port}", "--watch"]) == 1
    assert f"the store at 127.0.0.1:{port} does not answer: " in capsys.readouterr().err


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    script = ROOT / "lightning_async/cli/bin/lightning-async"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, str(script), "status", *arguments], env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_it_watches_until_the_store_is_gone():
    servers = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)]
    with command(f"127.0.0.1:{servers[0].port}", "--json", "--watch", "0.05") as process:
        assert process.stdout is not None
        for _ in range(3):
            assert json.loads(process.stdout.readline())["replicas"] == []
        servers.clear()
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out + err
    assert "Traceback" not in err


@pytest.mark.processes
def test_it_serves_prometheus_until_a_signal_comes():
    pytest.importorskip("prometheus_client")
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with command(f"127.0.0.1:{store.port}", "--prometheus", str(free_port())) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert b"# TYPE lightning_async_steps gauge" in answer.read()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
