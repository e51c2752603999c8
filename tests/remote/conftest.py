import os
import uuid

import boto3
import pytest
from moto.server import ThreadedMotoServer

from lineage.configs import storage


class Killed(BaseException):
    """Exception that simulates the death of the process."""


@pytest.fixture(scope="session")
def s3_environment():
    """Return environment variables by which s3fs and boto3 find a stand-in of S3, which runs in a thread."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    variables = {"AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port())}
    variables |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    before = dict(os.environ)
    os.environ.update(variables)
    yield variables
    os.environ.clear()
    os.environ.update(before)
    server.stop()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Return `cache(name)`, which makes an empty folder the place of local copies, as on another machine."""

    def cache(name):
        storage._local.cache_clear()
        monkeypatch.setenv("LINEAGE_CACHE", str(tmp_path / name))
        return tmp_path / name

    cache("cache")
    yield cache
    storage._local.cache_clear()


class Bucket:
    """Bucket of the stand-in of S3.

    Attributes:
        url: URL of a folder in it.
    """

    def __init__(self):
        self._name = f"bucket-{uuid.uuid4().hex[:8]}"
        self.url = f"s3://{self._name}/folder"
        self._client = boto3.client("s3")
        self._client.create_bucket(Bucket=self._name)

    def put(self, files):
        """Write files, given their content by their names in the folder."""
        for name, content in files.items():
            self._client.put_object(Bucket=self._name, Key=f"folder/{name}", Body=content)

    def names(self):
        """Return the names of the files in the folder."""
        objects = self._client.list_objects_v2(Bucket=self._name).get("Contents", ())
        return [entry["Key"].removeprefix("folder/") for entry in objects]

    def get(self):
        """Return the content of the files by their names in the folder; none may be deleted meanwhile."""

        def read(name):
            return self._client.get_object(Bucket=self._name, Key=f"folder/{name}")["Body"].read()

        return {name: read(name) for name in self.names()}

    def delete(self, name):
        self._client.delete_object(Bucket=self._name, Key=f"folder/{name}")


@pytest.fixture
def bucket(s3_environment, cache):
    return Bucket()


def write(folder, files):
    """Write files, given their content by their names in the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
