"""An S3 server in this process, moto's, with one bucket; and the environment in which obstore finds it."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

BUCKET = "runs-of-tests"
NOT_INSTALLED = "moto's S3 server is not installed: pip install 'moto[s3,server]'"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Yields the environment variables. Skips the test where moto is missing."""
    pytest.importorskip("moto.server", reason=NOT_INSTALLED)
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    try:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
    finally:
        server.stop()
