"""The page of a real run with a failure and a resume, opened in a browser that is 400 pixels wide."""

import os
import re
import shutil
import subprocess

import pytest

from launch.runs.store import RunFolder
from tests.faults.injection import VARIABLE, hook
from tests.launch.command_line import SMALL, gpipe_here, only_run

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the browser of `apt-get install chromium`")

PLACED_IN_A_V = "pipeline.schedule=zbv pipeline.virtual_stages=2 pipeline.stages=2 tracking.wandb=disabled"
KILL = [{"fault": "kill", "stage": 1, "step": 4, "action": "F1"}]

NARROW = """<iframe id="page" src="report.html" style="width: 400px; height: 6000px; border: 0"></iframe>
<script>
onload = () => {
  const page = document.getElementById("page").contentDocument
  const shown = document.createElement("pre"), root = page.documentElement
  shown.textContent = root.scrollWidth - root.clientWidth + " too wide\\n" + page.body.innerText
  document.body.append(shown)
}
</script>"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    settings = f"{SMALL.replace('pipeline.schedule=fill_drain ', '')} {PLACED_IN_A_V}"
    arguments = "t24_1_3b_wide", "--scale", "laptop", "--launcher", "local", "--set", f"{settings} train.steps=6"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, hook(KILL))
        gpipe_here(folder, "experiment", *arguments)
    gpipe_here(folder, "resume", str(only_run(folder)), "--launcher", "local", "--set", "train.steps=9")
    return RunFolder(only_run(folder))


def opened(run, *options):
    """Opens the page in a frame of 400 pixels; returns what the browser prints, and what it complains of."""
    wrapper = run.path / "narrow.html"
    wrapper.write_text(NARROW)
    fixed = "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"
    command = [CHROMIUM, *fixed, *options, wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_the_page_is_whole_and_readable_on_a_narrow_screen(run):
    shown, complaints = opened(run, "--dump-dom")
    assert not complaints
    text = shown[shown.index("<pre>") :]
    assert re.match(r"<pre>0 too wide\n", text), "the page scrolls sideways"
    planned = re.findall(r"stage (\d, cell \d): layers (\d+-\d+) ", run.plan_text.read_text())
    assert [stage for stage, _ in planned] == ["0, cell 0", "1, cell 0", "1, cell 1", "0, cell 1"]
    assert re.findall(r"(\d, cell \d)\s+(\d+-\d+)\s", text) == planned
    for words in ("Wall time of all attempts", "start of the workers", "killed", "resumed", "failed"):
        assert words in text, words
    picture = run.path / "narrow.png"
    opened(run, f"--screenshot={picture}", "--window-size=500,6000")
    assert os.path.getsize(picture) > 50_000
