"""Local copies of files on remote storage and on the Hugging Face Hub, for every package.

A remote path is `hf:ORG/NAME[@REVISION][/PATH]` (see `lineage.configs.hub`) or a URL that fsspec supports, such as
s3://BUCKET/FOLDER or gs://BUCKET/FILE. Credentials and endpoints are those of s3fs and gcsfs, such as
the environment variables AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL.
"""

import contextlib
import functools
import glob
import os
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from lineage.configs import cache, hub

REMOTE = re.compile(r"hf:|[A-Za-z][\w+.-]*://")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # scheme -> extra of the project
VERSION = ("ETag", "etag", "md5Hash", "LastModified", "mtime", "updated", "created")  # metadata, best first
RECORD = "about/metadata"  # record of a checkpoint, uploaded last and deleted first
STEP = re.compile(r"(?:.*/)?checkpoints/\d+/")
THREADS = 8


def is_remote(path: str | os.PathLike) -> bool:
    """Return whether a path is on remote storage or on the Hub."""
    return REMOTE.match(os.fspath(path)) is not None


def local(path: str | os.PathLike, suffixes: tuple[str, ...] | None = None) -> str:
    """Return the path of a local copy of a remote file or folder, or of the files that match a glob.

    Several remote paths may be separated by commas. A local path is returned as it is. A file is downloaded again only
    if it has changed; in one process, each path is looked up once.

    Args:
        suffixes: suffixes of the files to copy from a data folder, (): all; None: the folder of a run or a model.

    Raises:
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: the package for the storage is not installed.
        OSError: the storage cannot be read; the message says why.
    """
    parts = re.split(rf",(?={REMOTE.pattern})", os.fspath(path))
    return ",".join(_local(part, suffixes) if is_remote(part) else part for part in parts)


def is_present(path: str | os.PathLike) -> bool:
    """Return whether a path is that of a file; raise ValueError for anything else, such as a link to a missing file."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is neither a file nor a link to one that exists: restore it, or delete it.")
    return os.path.isfile(path)


@functools.cache
def _local(url: str, suffixes: tuple[str, ...] | None) -> str:
    if url.startswith("hf:"):
        return hub.download(url, suffixes)
    files = Files(url)
    place = copy_of(files.url, "files")
    files.download(place, suffixes or ())
    return str(place / files.pattern)


def copy_of(url: str, kind: str) -> Path:
    """Return the path of the local copy of a URL; `kind` is the subfolder of the cache."""
    scheme, _, rest = url.partition("://")
    parts = PurePosixPath(rest).parts
    if not parts or ".." in parts or rest.startswith("/"):
        raise ValueError(f"{url!r} is not a path on remote storage: it must have the form s3://BUCKET/PATH.")
    return cache.root() / kind / scheme / Path(*parts)


def name(path: str | os.PathLike) -> str:
    """Return the remote path of a local copy, without the Hub revision; any other path is returned as it is."""
    path = os.fspath(path)
    with contextlib.suppress(FileNotFoundError):  # there is no cache
        if path.startswith(root := f"{cache.root()}{os.sep}files{os.sep}"):
            scheme, _, rest = path.removeprefix(root).partition(os.sep)
            return f"{scheme}://{rest}"
    if match := re.search(r"/(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/[^/]+(/.*)?$", path):
        return f"hf:{match[1]}/{match[2]}{match[3] or ''}"
    return path


@contextlib.contextmanager
def readable_errors(url: str) -> Iterator[None]:
    """Convert errors of storage packages, which have their own exception types, to OSError with one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no {url}{_reason(error, ' (', ')')}.") from error
    except Exception as error:
        raise OSError(f"{url} cannot be used: {_reason(error, f'{type(error).__name__}: ')}.") from error


def _reason(error: Exception, before: str = "", after: str = "") -> str:
    text = " ".join(str(error).split())[:200].rstrip(".")
    return f"{before}{text}{after}" if text else ""


class Files:
    """Files under a URL: a single file, the files of a folder, or the matches of a glob.

    Attributes:
        url: URL without a glob pattern and without a trailing slash.
        pattern: glob pattern, relative to the URL; "": no glob.
        system: file system of fsspec.
        path: path of the URL in the file system.
    """

    def __init__(self, url: str):
        if url.startswith("hf:"):
            raise ValueError(f"{url} is on the Hugging Face Hub, which is read-only: use a folder or a bucket's URL.")
        if "::" in url:  # fsspec would open a file system in another one, such as a list of references to any files
            raise ValueError(f"{url} names several file systems: it must be a URL such as s3://BUCKET/PATH.")
        self.url, self.pattern = re.fullmatch(r"(.+?)/*(?:(?<=/)([^/]*[*[].*))?", url).groups("")
        scheme = url.partition("://")[0]
        install = f"pip install 'lineage[{EXTRAS[scheme]}]'" if scheme in EXTRAS else "pip install fsspec"
        try:
            import fsspec

            fsspec.get_filesystem_class(scheme)
        except ValueError:
            known = "a local path, hf:ORG/NAME, or a URL such as gs://BUCKET/PATH and s3://BUCKET/PATH"
            raise ValueError(f"{url} has the unknown scheme {scheme!r}: it must be {known}.") from None
        except ImportError as error:
            hint = f"`{install}`" if scheme in EXTRAS or error.name == "fsspec" else _reason(error)
            raise ModuleNotFoundError(f"{url} needs a package that is not installed: {hint}.") from None
        with readable_errors(url):
            self.system, self.path = fsspec.url_to_fs(self.url)

    def at(self, name: str) -> str:
        """Return the path in the file system of a name relative to the URL; "" is the URL itself."""
        return f"{self.path}/{name}" if name else self.path

    def listed(self, incomplete: bool = False) -> dict[str, Mapping[str, Any]]:
        """Return the metadata of each file by its name relative to the URL; the name of a single file is "".

        Hidden files are omitted, as are files of incomplete checkpoints unless `incomplete` is set.

        Raises:
            FileNotFoundError: there is no file.
        """
        with readable_errors(f"{self.url}/{self.pattern}".rstrip("/")):
            self.system.invalidate_cache()
            if self.pattern:
                infos = self.system.glob(self.at(self.pattern), detail=True)
            elif (info := self.system.info(self.path))["type"] == "file":
                return {"": info}
            else:
                infos = self.system.find(self.path, detail=True)
            files = {path.removeprefix(f"{self.path}/"): info for path, info in infos.items()}
            files = {name: info for name, info in files.items() if info["type"] == "file" and not is_hidden(name)}
            complete = {step for step in map(step_of, files) if f"{step}{RECORD}" in files}
            files = {name: info for name, info in files.items() if incomplete or step_of(name) in {"", *complete}}
            if not files:
                raise FileNotFoundError
        return files

    def download(self, place: Path, suffixes: tuple[str, ...] = ()) -> None:
        """Make the file or folder `place` a copy of the files; what is not on the storage is deleted.

        Args:
            suffixes: suffixes of the files to copy, before any compression suffix; (): all.
        """
        infos = self.listed()
        wanted = [
            name for name in infos if not suffixes or not name or hub.uncompressed(name).lower().endswith(suffixes)
        ]
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._fetch(name, infos[name], place / name), wanted))
        if "" in infos:
            return
        for name in glob.glob(self.pattern or "**", root_dir=place, recursive=True):
            if name not in infos and not is_hidden(name) and (place / name).is_file():
                (place / name).unlink(missing_ok=True)  # another process may be copying the same files
        for folder, _, _ in os.walk(place, topdown=False):
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(folder)

    def _fetch(self, name, info, place):
        with contextlib.suppress(FileNotFoundError):
            if stamp(place) == version(info):
                return
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}.{threading.get_ident()}.partial")
        try:
            with readable_errors(f"{self.url}/{name}".rstrip("/")):
                self.system.get_file(self.at(name), str(temporary))
                size, expected = temporary.stat().st_size, info.get("size")
                if expected is not None and size != expected:
                    raise OSError(f"the download has {size:,} bytes of {expected:,}")
            mark(temporary, info)
            temporary.replace(place)
        finally:
            temporary.unlink(missing_ok=True)


def version(info: Mapping[str, Any]) -> tuple[int | None, int]:
    """Return the size of a remote file and a number that changes with its content, in nanoseconds since 1970."""
    fact = next((info[key] for key in VERSION if info.get(key)), "")
    return info.get("size"), zlib.crc32(repr(fact).encode()) * 10**9


def stamp(place: Path) -> tuple[int, int]:
    """Return the size and the modification time of a local file, equal to `version` in an unchanged copy."""
    facts = place.stat()
    return facts.st_size, facts.st_mtime_ns


def mark(place: Path, info: Mapping[str, Any]) -> None:
    """Set the modification time of a copy to the number of its `version`."""
    os.utime(place, ns=(version(info)[1],) * 2)


def step_of(name: str) -> str:
    """Return the folder of the checkpoint that a file belongs to, with a trailing slash; "" if there is none."""
    match = STEP.match(name)
    return match[0] if match else ""


def is_hidden(name: str) -> bool:
    """Return whether a file, or a folder around it, is hidden or temporary, or has no name, as in "/a" and "a//b"."""
    return any(not part or part.startswith(".") or ".orbax-checkpoint-tmp" in part for part in name.split("/"))
