"""Trace which files `vitlab train` goes through until its first update, and `vitlab evaluate` until it prints; as JSON.

    python bench/house_trace.py

Both calls are real, on a CPU, with a folder of generated images and a tiny model.

- A file is *touched* when one of its functions runs in that time. Being imported does not count.
- A file is *opened* by a reader when it stands on the call stack at a landmark: where the data is opened, the recipe is made,
  the model is built, and so on down to the optimiser's step. What counts is the union over all landmarks.
- The *walk* is the part of the opened files that says what the run does: without `core`, `data`, `models` and `weights`,
  which a reader may take at their word, but with the file of the model itself.

`__init__.py` is never counted, and of `cli` only the files of single verbs, `..._verb.py`: the rest is the same for all of
them. A verb that does nothing but call a public function is a row of `cli/verbs.py`, so that its walk begins at that function.

Landmarks are found by what happens (a module is constructed, whole-number pixels become floats), and by four names of
classes; never by a function's name, so that functions can be moved and renamed. A landmark that does not occur is an error:
without it the count would be too low, and nobody would notice.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import pkgutil
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from PIL import Image
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

import vitlab

SOURCE = Path(vitlab.__file__).parent
LIBRARIES = {"core", "data", "models", "weights"}

# In the order in which they are passed; the last one ends the trace.
TRAIN = ["data opened", "images chosen", "recipe made", "model built", "weights drawn", "optimiser built"]
TRAIN += ["state assembled", "order drawn", "image decoded", "batch made", "batch fed", "forward pass", "attention"]
TRAIN += ["logits used", "backward pass", "optimiser step"]
EVALUATE = ["model built", "data opened", "images chosen", "batch fed", "forward pass", "logits used", "result printed"]

BY_CLASS = {"Dataset": "data opened", "Recipe": "recipe made", "TrainState": "state assembled", "Batch": "batch made"}
DRAW = {"normal_", "uniform_", "trunc_normal_"}
# One of these is the first thing that a loss or a measure does with logits.
ON_LOGITS = {"softmax", "log_softmax", "logsumexp", "cross_entropy", "sigmoid", "binary_cross_entropy_with_logits"}
ON_LOGITS |= {"argmax", "max", "topk", "sort", "argsort"}


class MissingLandmark(Exception):
    """A landmark did not occur, so the count of files would be too low."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """Per landmark, the files of the package on the call stack, outermost first; and all files that were touched."""

    stacks: dict[str, list[str]]
    touched: set[str]

    def to_json(self) -> dict[str, Any]:
        opened = list(dict.fromkeys(file for stack in self.stacks.values() for file in stack))
        model = self.stacks["forward pass"][-1]
        walk = [file for file in opened if file == model or file.partition("/")[0] not in LIBRARIES]
        return {"opened": opened, "walk": walk, "touched": sorted(self.touched), "landmarks": self.stacks}


class Tracer:
    """Note the stack at each landmark, and each file in which a function is called, until `last` is reached."""

    def __init__(self, last: str) -> None:
        self.last, self.stacks, self.touched = last, dict[str, list[str]](), set[str]()
        self._files: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`: called whenever a function is."""
        if event != "call" or self.last in self.stacks:
            return
        if file := self._file_of(frame):
            self.touched.add(file)
        name, variables = frame.f_code.co_name, frame.f_code.co_varnames
        if name == "__init__" and variables:
            self._constructed(type(frame.f_locals[variables[0]]), frame)
        elif variables[:1] == ("_cls",):  # the constructor of a named tuple, which is a nameless function
            self._constructed(frame.f_locals["_cls"], frame)
        elif name == "forward" and file:
            self.note("forward pass", frame)
        elif frame.f_code is torch.Tensor.backward.__code__:
            self.note("backward pass", frame)
        elif frame.f_code is Image.open.__code__:
            self.note("image decoded", frame, before="batch made")  # earlier ones belong to checks of the data

    def note(self, landmark: str, frame: FrameType | None, *, before: str = "") -> None:
        """Keep the stack of the first time, or of the last time before another landmark."""
        if self.last in self.stacks or (before or landmark) in self.stacks:
            return
        files: list[str] = []
        while frame is not None:
            file = self._file_of(frame)
            # Before a public function stand typer, the table of verbs, and the wrapper that makes options a value: nobody reads
            # them. A verb with a file of its own does more than that.
            is_wrapper = file.startswith(("cli/", "options/")) and not file.endswith("_verb.py")
            if file and not is_wrapper and file not in files[-1:]:
                files.append(file)
            frame = frame.f_back
        self.stacks[landmark] = files[::-1]
        if landmark == self.last:
            sys.setprofile(None)  # what follows need not be slow

    def computed(self, function: str, arguments: tuple[Any, ...], result: Any, frame: FrameType) -> None:
        """After each call of a torch function."""
        if function in DRAW:
            self.note("weights drawn", frame, before="optimiser built")
        elif function == "randperm":
            self.note("order drawn", frame, before="batch made")  # a split draws too, before that
        elif function == "scaled_dot_product_attention":
            self.note("attention", frame)
        tensors = [value for value in (*arguments, result) if isinstance(value, torch.Tensor)]
        if not tensors:
            return
        given, made = tensors[0], tensors[-1]
        if given.ndim == made.ndim == 4 and made.is_floating_point() and not given.is_floating_point():
            self.note("batch fed", frame, before="forward pass")  # augmentation may go to floats and back
        if function in ON_LOGITS and given.ndim == 2 and given.is_floating_point() and "forward pass" in self.stacks:
            self.note("logits used", frame)

    def _constructed(self, kind: type, frame: FrameType) -> None:
        if issubclass(kind, optim.Optimizer):
            self.note("optimiser built", frame)
        elif kind.__module__.startswith("vitlab."):
            if issubclass(kind, nn.Module):
                self.note("model built", frame)
            if kind.__name__ in BY_CLASS:
                self.note(BY_CLASS[kind.__name__], frame)
            if kind.__name__ == "Dataset":
                self.note("images chosen", frame, before="batch made")

    def _file_of(self, frame: FrameType) -> str:
        """Relative to the package; empty outside of it and for `__init__.py`."""
        name = frame.f_code.co_filename
        if name not in self._files:
            path = Path(name)
            counts = path.is_relative_to(SOURCE) and path.name != "__init__.py"
            self._files[name] = path.relative_to(SOURCE).as_posix() if counts else ""
        return self._files[name]


class Printed(io.StringIO):
    """Standard output that notes who writes first."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def write(self, text: str) -> int:
        self._tracer.note("result printed", sys._getframe(1))
        return super().write(text)


def trace(arguments: list[str], landmarks: list[str]) -> Traced:
    """Call `vitlab` in this process, to its end, and trace it up to the last landmark."""
    from vitlab.cli.main import app

    tracer = Tracer(landmarks[-1])

    class Computed(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tracer.computed(getattr(func, "__name__", ""), args, result, sys._getframe(1))
            return result

    step_hook = register_optimizer_step_pre_hook(lambda *_: tracer.note("optimiser step", sys._getframe(1)))
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        with Computed(), contextlib.redirect_stdout(Printed(tracer)):
            app(arguments, standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        step_hook.remove()
    return finish(tracer, arguments[0], landmarks)


def finish(tracer: Tracer, verb: str, landmarks: list[str]) -> Traced:
    if missing := [name for name in landmarks if name not in tracer.stacks]:
        raise MissingLandmark(
            f"`vitlab {verb}` passed without: {', '.join(missing)}; `Tracer` must learn where it is now"
        )
    return Traced({name: tracer.stacks[name] for name in landmarks}, tracer.touched)


def draw_images(folder: Path) -> None:
    """Two classes, to train and to test on."""
    for part, count in (("train", 12), ("test", 6)):
        for name, brightness in (("dark", 0), ("light", 150)):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                noise = Image.effect_noise((20, 20), 20 + 4 * i).point(lambda value, more=brightness: value // 2 + more)
                noise.convert("RGB").save(folder / part / name / f"{i}.png")


def main() -> None:
    for module in pkgutil.walk_packages(vitlab.__path__, "vitlab."):  # else what runs on import would be traced
        if module.name != "vitlab.__main__":
            importlib.import_module(module.name)
    with tempfile.TemporaryDirectory() as folder:
        data, run = f"{folder}/data", f"{folder}/run"
        draw_images(Path(data))
        common = ["--device", "cpu", "--threads", "1", "--quiet"]
        tiny = ["--model", "ViT-w16d1m16h2/8", "--set", "data.image_size=[16, 16]", "--set", "train.steps=2"]
        trained = trace(["train", data, "--out", run, *tiny, *common], TRAIN)
        evaluated = trace(["evaluate", run, *common], EVALUATE)
    print(json.dumps({"train": trained.to_json(), "evaluate": evaluated.to_json()}))


if __name__ == "__main__":
    main()
