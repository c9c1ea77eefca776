"""Pictures under their sha256: in a folder of the hub, or in a bucket of any S3 (extra `plant`)."""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from daemon.plant.settings import Pictures
from experts.durable import replacing

_MODE = 0o640
_DIGEST = re.compile("[0-9a-f]{64}")


class PictureStoreError(Exception):
    """A picture cannot be stored or read; the text says where and why."""


class FolderPictures:
    """Files `ab/abcd…` below one folder; storing a digest twice changes nothing. Raises PictureStoreError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, sha256: str, content: BinaryIO) -> None:
        with self._file(sha256) as file:
            if file.is_file():
                os.utime(file)  # its row comes now
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file, _MODE) as part, part.open("wb") as copy:
                content.seek(0)
                shutil.copyfileobj(content, copy)

    def get(self, sha256: str) -> bytes | None:
        with self._file(sha256) as file:
            content = file.read_bytes() if file.is_file() else None
        if content is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise PictureStoreError(f"{file} is damaged: it has another sha256")
        return content

    def remove(self, sha256: str) -> None:
        with self._file(sha256) as file:
            file.unlink(missing_ok=True)

    def stored_before(self, before_s: float) -> Iterator[str]:
        """Yield the digests of pictures stored before `before_s`, seconds since the epoch."""
        for file in self._folder.glob("??/*"):
            with self._file(file.name):
                if _DIGEST.fullmatch(file.name) and file.is_file() and file.stat().st_mtime < before_s:
                    yield file.name

    @contextmanager
    def _file(self, sha256: str) -> Iterator[Path]:
        file = self._folder / sha256[:2] / sha256
        try:
            yield file
        except OSError as error:
            raise PictureStoreError(f"{file}: {error.strerror or error}") from None


class S3Pictures:
    """Objects `PREFIX/abcd…` of a bucket, with boto3's own credentials, retries and checksums."""

    def __init__(self, place: str, endpoint: str | None = None) -> None:
        import boto3  # noqa: PLC0415 - of the extra `plant`
        from botocore.config import Config  # noqa: PLC0415

        parts = urlsplit(place)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        timeouts = Config(connect_timeout=5, read_timeout=30, retries={"max_attempts": 3, "mode": "standard"})
        self._client: Any = boto3.client("s3", endpoint_url=endpoint, config=timeouts)

    def put(self, sha256: str, content: BinaryIO) -> None:
        content.seek(0)
        self._ask("put_object", sha256, Body=content)

    def get(self, sha256: str) -> bytes | None:
        answer = self._ask("get_object", sha256)
        return None if answer is None else answer["Body"].read()

    def remove(self, sha256: str) -> None:
        self._ask("delete_object", sha256)

    def stored_before(self, before_s: float) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=f"{self._prefix}/".lstrip("/")):
            for each in page.get("Contents", ()):
                digest = each["Key"].rpartition("/")[2]
                if _DIGEST.fullmatch(digest) and each["LastModified"].timestamp() < before_s:
                    yield digest

    def _ask(self, call: str, sha256: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        key = f"{self._prefix}/{sha256}".lstrip("/")
        try:
            return getattr(self._client, call)(Bucket=self._bucket, Key=key, **arguments)
        except (BotoCoreError, ClientError) as error:
            if isinstance(error, ClientError) and error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise PictureStoreError(f"s3://{self._bucket}/{key}: {error}") from None


PictureStore = FolderPictures | S3Pictures


def open_pictures(settings: Pictures) -> PictureStore:
    if settings.s3 is not None:
        return S3Pictures(settings.s3, settings.endpoint)
    return FolderPictures(settings.folder or Path())
