"""Downloads from the Hugging Face Hub into its cache, which also works offline."""

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

PATH = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.+))?")
# Files of a model to download; weights are never read from pickles.
MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
)
UNSAFE = tuple(f"*.{kind}" for kind in ("bin", "ckpt", "pickle", "pkl", "pt", "pth", "py"))
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class NoFileError(FileNotFoundError):
    """Exception raised if a repository has none of the requested files."""


def download(path: str, suffixes: tuple[str, ...] | None = None) -> str:
    """Return the local path of a model or of data set files, downloading what is not in the cache.

    Pickles and programs are never downloaded.

    Args:
        path: `hf:ORG/NAME[@REVISION][/PATH]`, where PATH is a file, a folder or a glob.
        suffixes: file suffixes to download from a data set folder, (): all; None: the repository is a model.

    Raises:
        FileNotFoundError: there is no such repository or revision, or it is not in the cache; NoFileError: no such
            file.
        ModuleNotFoundError: huggingface_hub is not installed.
        PermissionError: the repository is gated, or private.
        OSError: the download failed.
    """
    match = PATH.fullmatch(path)
    if not match or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path on the Hugging Face Hub: it must be hf:ORG/NAME[@REVISION][/PATH].")
    repository, revision, inside = match.groups("")
    if suffixes:
        folder, kinds = f"{inside}/" if inside else "", [case for kind in suffixes for case in (kind, kind.upper())]
        allowed = [inside] * bool(inside) + [f"{folder}*{kind}{end}" for kind in kinds for end in ("", *COMPRESSED)]
    elif inside:
        allowed = [inside, f"{inside}/*"]
    else:
        allowed = [*MODEL] if suffixes is None else ["*"]
    folder = _snapshot(path, repository, revision, "model" if suffixes is None else "dataset", allowed)
    if not inside and suffixes is None and not any(folder.glob("*.safetensors")):
        raise NoFileError(f"{path} has no model.safetensors: weights are read from safetensors only.")
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in allowed):
        end = f" that ends with {' or '.join(suffixes)}" if suffixes else ""
        raise NoFileError(f"The Hugging Face Hub has no file {path}{end}.")
    return str(folder / inside)


def uncompressed(name: str) -> str:
    """Return the name or path of a file without its compression suffix."""
    stem, suffix = os.path.splitext(name)
    return stem if suffix in COMPRESSED else name


def _snapshot(path: str, repository: str, revision: str, kind: str, allowed: list[str]) -> Path:
    """Return the cache folder with the allowed files of a repository."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        install = "pip install 'lineage[hub]'"
        raise ModuleNotFoundError(f"{path} needs a package that is not installed: `{install}`.") from None
    settings = {"repo_type": kind, "revision": revision or None, "allow_patterns": allowed}
    try:
        return Path(huggingface_hub.snapshot_download(repository, ignore_patterns=[*UNSAFE], **settings))
    except errors.GatedRepoError as error:
        page = f"datasets/{repository}" if kind == "dataset" else repository
        raise PermissionError(
            f"{path} is gated: ask for access on the page of {page}, and log in with `hf auth login` or HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        absent = f"{path}: the Hugging Face Hub has no {'data set' if kind == 'dataset' else kind} {repository}"
        raise FileNotFoundError(f"{absent}, or it is private and needs `hf auth login` or HF_TOKEN.") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{path}: {repository} has no revision {revision!r}.") from error
    except errors.LocalEntryNotFoundError as error:
        command = f"hf download {repository}" + (" --repo-type=dataset" if kind == "dataset" else "")
        command += f" --revision={revision}" if revision else ""
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") in ("1", "true") else "it cannot be reached"
        raise FileNotFoundError(
            f"{path} is not complete in the cache of the Hugging Face Hub ({why}): run `{command}` with a connection."
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise OSError(f"{path} cannot be downloaded: {type(error).__name__}: {reason}.") from error
