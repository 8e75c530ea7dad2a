"""Objects of s3:// and gs:// buckets: listed whole or not at all, read in ranges of one version, written and removed.

The credentials are those of the environment, and are looked up again when the bucket says that they have expired.
Its rule: what may pass is tried again, what will not is an error at once.
"""

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import GCSStore, S3Store

from burnish.errors import StorageError

RETRIES: Any = {
    "max_retries": 8,
    "retry_timeout": timedelta(minutes=2),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2},
}
"""Of a request that is answered with 429, 5xx or not at all."""
PIECE_BYTES = 1 << 18
PART_BYTES = 1 << 23
"""Of an object that is written in parts, unless it would have too many."""
_MOST_PARTS = 9_000
"""S3 takes 10,000."""
_PARTS_AT_ONCE = 4
BODY_TRIES = 4
"""Of a request whose answer broke off."""

_CLIENT: Any = {"connect_timeout": "10s", "read_timeout": "60s", "timeout": "10m"}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired")
_ELSEWHERE = "Received redirect"
"""What the client says of a bucket that answers from another region."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Object:
    """One version of an object."""

    key: str
    size: int
    """Bytes."""
    etag: str | None
    """Quotes included."""
    version: str
    """Changes with the content: the ETag, or else when it was written."""


@dataclass(frozen=True, slots=True)
class _Intent:
    """What a request is for, as its errors say it."""

    problem: str
    right: str
    kept: str = ""


_READ = _Intent("cannot be had", "list and read", ": what was fetched is kept")
_WRITE = _Intent("cannot be written", "write to")
_DELETE = _Intent("cannot be removed", "delete from")


class Bucket:
    """One bucket. Its methods may be called from several threads."""

    def __init__(self, scheme: str, name: str) -> None:
        self._scheme = scheme
        self._name = name
        self._store = _connect(scheme, name)

    def list(self, key: str) -> list[Object]:
        """All objects below ``key``, or else the object ``key`` itself; none where nothing is.

        Raises:
            StorageError: the listing could not be had whole.
        """
        found = self._call(key, lambda store: _list_all(store, key))
        # Some tools mark a folder by an empty object of its name.
        found = [meta for meta in found if meta["path"] != key]
        if not found and key:
            try:
                found = [self._call(key, lambda store: obstore.head(store, key))]
            except FileNotFoundError:
                found = []
        objects = {meta["path"]: _describe(meta) for meta in found}
        if len(objects) < len(found):
            raise StorageError(self.uri(key), "has keys that differ only in empty parts (//)", fix="rename them")
        folders = {path[: slash.start()] for path in objects for slash in re.finditer("/", path)}
        return [objects[path] for path in sorted(objects) if objects[path].size or path not in folders]

    def read(self, wanted: Object, *, start: int = 0, stop: int | None = None) -> Sequence[bytes]:
        """The bytes of ``wanted`` from ``start`` to ``stop``, in pieces: to join them takes their memory twice.

        Raises:
            StorageError: it is another version by now, or cannot be had.
        """
        stop = wanted.size if stop is None else stop
        if start == stop:
            return []
        options: Any = {"range": (start, stop), "if_match": wanted.etag}

        def get(store: Any) -> Sequence[bytes]:
            answer = obstore.get(store, wanted.key, options=options)
            if answer.meta["size"] != wanted.size or _etag(answer.meta) not in (wanted.etag, None):
                raise PreconditionError
            pieces = list(answer.stream(min_chunk_size=PIECE_BYTES))
            if (came := sum(map(len, pieces))) != stop - start:
                raise BaseError(f"{came} of {stop - start} bytes came")
            return pieces

        try:
            return self._call(wanted.key, get)
        except (PreconditionError, FileNotFoundError) as error:
            problem = "was replaced or removed while it was read"
            raise StorageError(self.uri(wanted.key), problem, fix="start again when it is written") from error

    def write(self, key: str, content: Path | bytes, *, new: bool = False) -> str | None:
        """Make ``content`` the object ``key``; returns its ETag.

        Raises:
            StorageError: it cannot be written; or is there although it must be ``new``.
        """
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        options: Any = {
            "mode": "create" if new else "overwrite",
            "use_multipart": size > PART_BYTES and not new,
            "chunk_size": max(PART_BYTES, -(-size // _MOST_PARTS)),
            "max_concurrency": _PARTS_AT_ONCE,
        }
        try:
            return _etag(self._call(key, lambda store: obstore.put(store, key, content, **options), to=_WRITE))
        except (AlreadyExistsError, PreconditionError) as error:
            raise StorageError(self.uri(key), "is there already", fix="name a new folder") from error
        except FileNotFoundError as error:
            raise self._explain(key, error, to=_WRITE) from None

    def delete(self, key: str) -> None:
        """Remove the object ``key``, if it is there.

        Raises:
            StorageError: it cannot be removed.
        """
        with suppress(FileNotFoundError):
            self._call(key, lambda store: obstore.delete(store, key), to=_DELETE)

    def uri(self, key: str) -> str:
        """The whole name of ``key``."""
        return f"{self._scheme}://{self._name}/{key}"

    def _call(self, key: str, action: Callable[[Any], _T], *, to: _Intent = _READ) -> _T:
        renewed, failures = False, 0
        while True:
            try:
                return action(self._store)
            except (PreconditionError, AlreadyExistsError, FileNotFoundError):
                raise
            except BaseError as error:
                status, code = _answer(error)
                if (code in _EXPIRED or status == 401) and not renewed:
                    self._store, renewed = _connect(self._scheme, self._name), True
                    continue
                failures += 1
                answered = bool(status) or _ELSEWHERE in str(error)  # the client has tried again what may pass
                if answered or failures == BODY_TRIES:
                    raise self._explain(key, error, to=to) from None
                time.sleep(0.2 * 2**failures)

    def _explain(self, key: str, error: Exception, *, to: _Intent) -> StorageError:
        """Without the client's own account of the request, which is long."""
        status, code = _answer(error)
        said = " ".join(dict.fromkeys(filter(None, (str(status or ""), code)))) or str(error).partition("\n")[0]
        place = f"bucket {self._scheme}://{self._name}"
        problem, fix = to.problem, f"check the network and the endpoint, then start again{to.kept}"
        if "169.254.169.254" in str(error) or "metadata.google.internal" in str(error):
            problem, fix = "no credentials were found", _CREDENTIALS[self._scheme]
        elif code in _EXPIRED or status == 401:
            problem = "the credentials have expired or are not valid"
            fix = f"log in again, then start again{to.kept}"
        elif code in ("SignatureDoesNotMatch", "InvalidAccessKeyId"):
            problem = "the credentials are not valid"
            fix = "correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile"
        elif status == 403:
            problem = "access is denied"
            fix = f"let these credentials {to.right} the {place}, or use others"
        elif _ELSEWHERE in said or code == "AuthorizationHeaderMalformed":
            problem, fix = f"the {place} is in another region", "set AWS_REGION to the bucket's region"
        elif status == 404:
            problem, fix = f"there is no {place}", "check its name and the endpoint"
        return StorageError(self.uri(key), f"{problem} ({said})", fix=fix)


@lru_cache(maxsize=64)
def _bucket(scheme: str, name: str) -> Bucket:
    return Bucket(scheme, name)


def open_bucket(uri: str) -> tuple[Bucket, str]:
    """The bucket of ``uri`` and the key there, taken literally but for slashes at its end.

    Raises:
        StorageError: it is no s3://, gs:// or gcs:// URI, or names no bucket or key.
    """
    scheme, _, rest = uri.partition("://")
    scheme = {"gcs": "gs"}.get(scheme.lower(), scheme.lower())
    name, _, key = rest.partition("/")
    key = key.rstrip("/")
    if scheme not in _CREDENTIALS or not _NAME.fullmatch(name):
        raise StorageError(uri, "is no place that is read", fix="give a local path, s3://BUCKET/KEY or gs://BUCKET/KEY")
    if key and {"", ".", ".."} & set(key.split("/")):
        raise StorageError(uri, "has an empty part, . or .. in its key", fix="rename it, or write one slash only")
    return _bucket(scheme, name), key


def _list_all(store: Any, key: str) -> list[Any]:
    """Asks again after the last key until nothing is there: an answer that is no page looks like the last one."""
    found: list[Any] = []
    last = ""
    while more := [m for m in obstore.list(store, key or None, offset=last or None).collect() if m["path"] > last]:
        found += more
        last = max(meta["path"] for meta in more)
    return found


def _etag(meta: Any) -> str | None:
    """Some buckets quote it in one answer and not in another."""
    etag = meta["e_tag"]
    return etag if etag is None or etag.endswith('"') else f'"{etag}"'


def _describe(meta: Any) -> Object:
    etag = _etag(meta)
    return Object(meta["path"], meta["size"], etag, etag or meta["version"] or meta["last_modified"].isoformat())


def _answer(error: Exception) -> tuple[int | None, str]:
    """The status and the error code that a bucket answered with."""
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    return int(status[1]) if status else None, code[1] if code else ""


_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}


def _connect(scheme: str, name: str) -> Any:
    try:
        return _connect_s3(name) if scheme == "s3" else _connect_gs(name)
    except (BaseError, ValueError) as error:
        problem = f"its credentials cannot be used ({str(error).partition(chr(10))[0]})"
        raise StorageError(f"{scheme}://{name}", problem, fix=_CREDENTIALS[scheme]) from None


def _connect_s3(name: str) -> S3Store:
    """Keys in the environment, instance, container and web identities are the client's own; profiles are boto3's."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        fix = "begin it with https:// or http://"
        raise StorageError(f"AWS_ENDPOINT_URL={endpoint}", "is no address of a server", fix=fix)
    settings: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    files = [os.environ.get("AWS_SHARED_CREDENTIALS_FILE"), os.environ.get("AWS_CONFIG_FILE"), "~/.aws/credentials"]
    profile = "AWS_PROFILE" in os.environ or any(file and Path(file).expanduser().is_file() for file in files)
    if profile and "AWS_ACCESS_KEY_ID" not in os.environ and "AWS_SKIP_SIGNATURE" not in os.environ:
        settings["credential_provider"] = _profile(name)
    client: Any = {**_CLIENT, "allow_http": bool(endpoint and endpoint.startswith("http://"))}
    return S3Store(name, client_options=client, retry_config=RETRIES, **settings)


def _profile(name: str) -> Any:
    try:
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        fix = "pip install 'burnish[s3]'"
        raise StorageError(f"s3://{name}", "reading AWS profiles needs boto3", fix=fix) from error
    try:
        return Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:
        raise StorageError(f"s3://{name}", f"no credentials were found ({error})", fix=_CREDENTIALS["s3"]) from error


def _connect_gs(name: str) -> GCSStore:
    """Keys of service accounts, users and instances are the client's own; federated identities are google-auth's."""
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    settings: dict[str, Any] = {}
    if emulator:
        url = emulator if "://" in emulator else f"http://{emulator}"
        key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        settings["service_account_key"] = json.dumps(key)
    file = Path(
        os.environ.get("GOOGLE_APPLICATION_CREDENTIALS", "~/.config/gcloud/application_default_credentials.json")
    )
    if not emulator and file.expanduser().is_file():
        kind = json.loads(file.expanduser().read_text()).get("type")
        if kind not in ("service_account", "authorized_user"):
            settings["credential_provider"] = _federated(name)
    client: Any = {**_CLIENT, "allow_http": bool(emulator)}
    return GCSStore(name, client_options=client, retry_config=RETRIES, **settings)


def _federated(name: str) -> Any:
    try:
        from google.auth.exceptions import GoogleAuthError
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError as error:
        fix = "pip install 'burnish[gs]'"
        raise StorageError(f"gs://{name}", "this kind of credentials needs google-auth", fix=fix) from error
    try:
        return GoogleCredentialProvider()
    except GoogleAuthError as error:
        raise StorageError(f"gs://{name}", f"no credentials were found ({error})", fix=_CREDENTIALS["gs"]) from error
