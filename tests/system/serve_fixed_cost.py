"""The server with the model of `fixed_cost`, for `serving_trials`: everything but the model is what `vitlab serve` runs.

python serve_fixed_cost.py FOLDER PORT '{"max_batch": 8}'
"""

import asyncio
import json
import sys

from vitlab.core.console import Console
from vitlab.serving.admission import Visitors
from vitlab.serving.app import make_app
from vitlab.serving.listening import bound_socket, listen
from vitlab.serving.service import Service
from vitlab.serving.settings import Limits, ModelSettings, Source


def main(folder: str, port: str, limits: str) -> None:
    settings = ModelSettings((Source("fixed", folder),), "cpu", 1, "fixed_cost:build")
    service = Service(settings, Limits(**json.loads(limits)))
    app = make_app(service, Visitors(frozenset()), Console())
    asyncio.run(listen(app, service, bound_socket("127.0.0.1", int(port)), lambda: None))


if __name__ == "__main__":  # processes that are forked import this file
    main(*sys.argv[1:])
