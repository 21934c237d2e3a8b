"""A bundle small enough to damage a thousand times."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vitlab.core import fsio
from vitlab.data.preprocess import Preprocess
from vitlab.models.build import build
from vitlab.models.spec import ModelSpec, ViTSpec
from vitlab.weights.bundle import Bundle, save_bundle

SMALL = ViTSpec(width=8, depth=1, mlp_dim=16, heads=2, patch=4, image_size=(8, 8), in_channels=1, num_classes=3)


@pytest.fixture
def make_bundle() -> Callable[..., Bundle]:
    def make(spec: ModelSpec = SMALL, labels: tuple[str, ...] = ("a", "b", "c")) -> Bundle:
        model = build(spec, seed=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(1))
        rule = Preprocess(mode="L", image_size=spec.image_size, mean=(0.5,), std=(0.5,))
        return Bundle(model, rule, labels, "# card\n", {"format": "test"})

    return make


@pytest.fixture
def saved(tmp_path: Path, make_bundle: Callable[..., Bundle]) -> Path:
    save_bundle(tmp_path / "bundle", make_bundle())
    return tmp_path / "bundle"


@pytest.fixture
def rewrite(saved: Path) -> Callable[[str, bytes | str], Path]:
    """Puts other content into one file of the saved bundle and mends the manifest, as bad intent would."""

    def change(name: str, content: bytes | str) -> Path:
        raw = content.encode() if isinstance(content, str) else content
        (saved / name).write_bytes(raw)
        manifest = json.loads((saved / fsio.MANIFEST).read_text())
        manifest["sha256"][name] = hashlib.sha256(raw).hexdigest()
        (saved / fsio.MANIFEST).write_text(json.dumps(manifest))
        return saved

    return change
