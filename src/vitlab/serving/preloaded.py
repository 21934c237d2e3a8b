"""What the processes of a server have in common, imported once: see `process_context`."""

import vitlab.engines.classifier as _classifier
import vitlab.engines.inference as _inference
import vitlab.serving.decoding as _decoding
import vitlab.serving.model_process as _model_process

__all__ = ["_classifier", "_decoding", "_inference", "_model_process"]
