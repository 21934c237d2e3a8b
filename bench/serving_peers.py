"""The peers of `bench/serving.py`: one server of each, in a process group of its own, until it is stopped from outside.

    python bench/serving_peers.py litserve BUNDLE PORT --batch 8 --threads 2

Both answer POST /predict, a form with one file named `image`, with the label. Decoding and model are vitlab's own
functions, so that only the serving differs.
"""

import argparse

import litserve as ls
import torch
import uvicorn
from fastapi import FastAPI, Request, UploadFile

import vitlab
from vitlab.data.decode import read
from vitlab.data.preprocess import normalise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["litserve", "fastapi"])
    parser.add_argument("bundle")
    parser.add_argument("port", type=int)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--wait-ms", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    (serve_litserve if given.peer == "litserve" else serve_fastapi)(given)


def serve_fastapi(given: argparse.Namespace) -> None:
    """A handler as tutorials write it: a plain function, which FastAPI runs in its pool of threads, one image at a time."""
    clf = vitlab.load(given.bundle, device="cpu")
    app = FastAPI()

    @app.post("/predict")
    def predict(image: UploadFile) -> dict[str, str]:
        x_BCYX = normalise(clf.preprocess, read(image.file.read(), clf.preprocess)[None])
        with torch.inference_mode():
            return {"label": clf.labels[int(clf.model(x_BCYX).argmax())]}

    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


def serve_litserve(given: argparse.Namespace) -> None:
    api = Api(max_batch_size=given.batch, batch_timeout=given.wait_ms / 1e3)
    api.bundle, api.threads = given.bundle, given.threads
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=600)
    server.run(host="127.0.0.1", port=given.port, generate_client_file=False, log_level="warning")


class Api(ls.LitAPI):
    """Batched, as LitServe's documentation shows it: the worker that runs the model also decodes and stacks the images."""

    bundle: str
    threads: int

    def setup(self, device: str) -> None:
        torch.set_num_threads(self.threads)
        self.clf = vitlab.load(self.bundle, device=device)

    def decode_request(self, request: Request) -> torch.Tensor:
        return read(request["image"].file.read(), self.clf.preprocess)

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    @torch.inference_mode()
    def predict(self, x: torch.Tensor) -> list[int]:
        return self.clf.model(normalise(self.clf.preprocess, x)).argmax(dim=1).tolist()

    def unbatch(self, output: list[int]) -> list[int]:
        return output

    def encode_response(self, output: int) -> dict[str, str]:
        return {"label": self.clf.labels[output]}


if __name__ == "__main__":
    main()
