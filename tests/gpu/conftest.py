"""What deterministic mode on a GPU asks for: cuBLAS reads it when it starts, and a test that is run alone must find it too."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
