"""Scripts without `if __name__ == "__main__":`, where processes are started anew: reported so, and by no other reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.names import parse_name
from vitlab.models.spec import changed
from vitlab.weights.bundle import Bundle, save_bundle

GUARD = 'if __name__ == "__main__":'
SPAWN = 'import multiprocessing\nmultiprocessing.set_start_method("spawn", force=True)\nimport vitlab\n'
PREDICT = 'vitlab.predict("bundle", "photos", workers=1, batch_size=2, device="cpu", quiet=True)'
CHECK = 'vitlab.check_data("photos", workers=1, quiet=True)'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(20):
            pixels = torch.randint(0, 256, (16, 16, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path


def make_bundle(folder: Path) -> None:
    spec = changed(parse_name("ViT-w16d1m16h1/16"), {"num_classes": 2, "image_size": (16, 16)})
    rule = Preprocess(image_size=(16, 16))
    save_bundle(folder / "bundle", Bundle(build(spec), rule, ("cat", "dog"), "", {}))


def run(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(text)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("call", [PREDICT, CHECK] if os.environ.get("VITLAB_SOAK") == "1" else [CHECK])
@pytest.mark.slow
def test_script_without_a_main_guard_is_refused_with_the_line_it_lacks(folder: Path, call: str) -> None:
    make_bundle(folder)
    done = run(folder, SPAWN + call)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"Put its calls of vitlab under `{GUARD}`.")
    assert "memory" not in done.stderr


def test_a_script_with_the_guard_works(folder: Path) -> None:
    make_bundle(folder)
    done = run(folder, f"{SPAWN}{GUARD}\n    {PREDICT}\n    print('predicted')\n    {CHECK}\n    print('checked')")
    assert (done.returncode, done.stdout) == (0, "predicted\nchecked\n"), done.stderr
