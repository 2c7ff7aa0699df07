"""Detection of secrets, and their redaction from what is written, shown or sent. Standard library only.

Secrets are: values of environment variables with names of secrets; values of variables passed to a training program by
name (:func:`keep_secret`); the content of files named by ``RAY_AUTH_TOKEN_PATH`` and the like; and text in the form of
a credential, such as a password in a URL, an ``Authorization`` header, a well-known kind of key, or the value of an
option such as ``--api-key``. Redaction is the second line of defence. The first is that processes get no secrets that
they do not need, see :func:`for_ranks`.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, quote_plus

from trials.files import write_atomically

MASK = "***"
# Shorter values are words such as ``true``: redacting them would spoil texts and protect nothing.
MIN_CHARS = 6
_MIN_DIGITS = 12
"""Shortest secret of digits only; shorter ones may be sizes or dates."""
_NO_SECRETS = ("disabled", "enabled", "default")
VARIABLES = "TUNE_CLUSTER_REDACT"
"""Variable with the names of further secret variables, separated by commas; inherited like any other."""
_MAX_FILE_BYTES = 8192
_BLOCK_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 20

_SECRET_NAME = re.compile(
    r"SECRET|PASSW(OR)?D|PASSPHRASE"
    r"|(^|[_-])(TOKEN|CREDENTIALS?|(API|ACCESS|PRIVATE|STORAGE)_?KEY|CONNECTION_STRING|WEBHOOK)($|[_-])"
    r"|(^|[_-])(AUTH|DSN|PASS|PAT)$|(?<!PUBLIC)[_-](KEYS?|PWD)(_PATH|_FILE)?$",
    re.IGNORECASE,
)
_VOCABULARY = ("pad", "eos", "bos", "mask", "unk", "sep", "cls", "image", "video", "audio", "special", "start", "end")
"""Prefixes of ``token`` in names of tokenizer tokens."""
_OPTION_NAME = (
    r"passw(?:or)?d|passphrase|pwd|secret|credentials?|dsn|connection[_-]string"
    r"|(?:api|access|private|secret|account)[_-]?key|" + "".join(f"(?<!{word}[_-])" for word in _VOCABULARY) + "token"
)
_SECRET_OPTION = re.compile(rf"--?(?:[\w.-]*[_.-])?(?:{_OPTION_NAME})", re.IGNORECASE)
_PERHAPS_SECRET_OPTION = re.compile(r"--?(?:[\w.-]*[_.-])?(?:key|auth|pass|pat)", re.IGNORECASE)
"""Options that often have harmless values, such as ``--sort-key``: only values with digits count."""
_OPTION_VALUE = re.compile(
    rf"(?P<label>(?<![\w-])--(?:[\w.-]*[_.-])?(?:{_OPTION_NAME})(?:=[\"']?|[\"']?,?[ \t]+[\"']?))"
    r"(?!-)[^\s\"'<>\[\],;&*]{6,}",
    re.IGNORECASE,
)
_NAMES_A_FILE = re.compile(r"_(PATH|FILE)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_WITHHELD = re.compile(r"^(MLFLOW|RAY_AUTH|TUNE_CLUSTER_NOTIFY)_|WEBHOOK", re.IGNORECASE)
_MLFLOW_USER = "MLFLOW_TRACKING_USERNAME"
"""Variable that is no secret itself and often part of paths; with the password it forms the header sent."""
_RAY_TOKEN_FILE = ".ray/auth_token"

CREDENTIAL_FORM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}\b|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-[\w-]{20,}|xox[abeprs]-\S{10,}|AIza[\w-]{30,}|dapi[0-9a-f]{32}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]*)"
    r"|https://hooks\.slack\.com/[\w/-]+|https://[\w.]*discord(?:app)?\.com/api/webhooks/[\w/-]+"
)
"""Texts that are credentials by their form alone."""
_CREDENTIAL_MARKS = (
    *("PRIVATE KEY", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-"),
    *("xoxa-", "xoxb-", "xoxe-", "xoxp-", "xoxr-", "xoxs-", "AIza", "dapi", "eyJ", "hooks.slack.com", "/webhooks/"),
)
"""Every match of the pattern contains one of these; most texts have none, and searching for them is fast."""

_URL_USER = re.compile(r"://[^\s/@\"'<>\\]+@")
_LABELLED = re.compile(
    r"(?P<label>\bbearer[ \t]+(?=\S{16})|\bauthorization[\"']?[ \t]*[:=][ \t]*[\"']?(?:(?:bearer|basic|token)[ \t]+)?"
    r"|(?:password|passwd|passphrase|secret|(?:api|access|private|secret)[_-]?key|(?:hub|auth|access|api)[_-]token)"
    r"(?:=[\"']?|[\"'][ \t]*:[ \t]*[\"'])"
    r"|[?&][\w-]*(?:token|key|sig|signature|credential|auth)=)"
    r"[^\s&\"'<>\\,;]{6,}",
    re.IGNORECASE,
)
_LABEL_MARKS = (
    *("bearer", "authorization", "password", "passwd", "passphrase", "secret", "key", "_token", "-token"),
    *("token=", "key=", "sig=", "signature=", "credential=", "auth="),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret or, with ``_PATH`` or ``_FILE``, names a file with one."""
    return _SECRET_NAME.search(name) is not None


def keep_secret(names: Iterable[str]) -> None:
    """Redact the values of the variables ``names`` from now on, here and in child processes."""
    known = [name for name in os.environ.get(VARIABLES, "").split(",") if name]
    if added := [name for name in names if name and name not in known]:
        os.environ[VARIABLES] = ",".join([*known, *added])


def variable_in(text: str) -> str | None:
    """Return the variable whose secret value ``text`` contains; None if none."""
    for name, value in _secret_variables():
        if any(form in text for form in _all_spellings(frozenset((value,)), None)):
            return name
    return None


def is_secret_option(name: str) -> bool:
    """Whether an option or key of this name, with or without leading dashes, has a secret value."""
    return _SECRET_OPTION.fullmatch(f"--{name.lstrip('-')}") is not None


def literal_secret(words: Sequence[str]) -> int | None:
    """Return the index of the first word of a command that contains the literal value of a secret option; None if none.

    That is the word after ``--api-key``, or ``--api-key=VALUE``. Numbers, placeholders (``{name}``, ``$NAME``), tokens
    like ``<pad>`` and existing files are not secrets.
    """
    for i, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if not has_value:
            value = words[i + 1] if i + 1 < len(words) else ""
        if name.startswith("-") and _is_literal_secret(name, value):
            return i if has_value else i + 1
    return None


def _is_literal_secret(option: str, value: str) -> bool:
    is_number = re.fullmatch(r"[-+]?[\d._]+([eE][-+]?\d+)?", value) is not None and len(value) < _MIN_DIGITS
    if value[:1] in tuple("-{$<[") or is_number or not _is_worth_hiding(value) or _is_path(value):
        return False
    if is_secret_option(option):
        return True
    has_digits = any(char.isdigit() for char in value) and any(char.isalpha() for char in value)
    return has_digits and len(value) >= 8 and _PERHAPS_SECRET_OPTION.fullmatch(option) is not None


def _is_path(value: str) -> bool:
    """Whether it is an existing path on this host."""
    try:
        return Path(value).exists()
    except (OSError, ValueError):
        return False


def for_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove from ``environment`` what only controller and agents need: access to MLflow and Ray, webhooks.

    What training itself may need, such as keys to an object store, stays; it is redacted from the ranks' output.
    """
    return {name: value for name, value in environment.items() if _WITHHELD.search(name) is None}


def redact(text: str) -> str:
    """Replace every secret in ``text``, also in quoted or encoded form, by :data:`MASK`.

    Redact before cutting into lines or shortening: a part of a secret is not recognised.
    """
    return _redacted(text, _spellings_now())


def redactor() -> Callable[[str], str]:
    """Return :func:`redact` for many texts, which looks up secrets only once."""
    known = _spellings_now()
    return lambda text: _redacted(text, known)


def redact_all(value: Any, with_: Callable[[str], str] | None = None) -> Any:
    """Apply :func:`redact`, or ``with_``, to every string of a JSON value."""
    clean = with_ or redactor()
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list | tuple):
        return [redact_all(item, clean) for item in value]
    return {key: redact_all(item, clean) for key, item in value.items()} if isinstance(value, dict) else value


def redact_file(path: Path) -> bool:
    """Atomically redact a file that is no longer written to; return whether it contained secrets.

    Raises:
        OSError: it cannot be read or replaced; it is then unchanged.
    """
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as source:
        if all(block == clean for block, clean in _blocks(source)):
            return False
        source.seek(0)
        write_atomically(path, (clean for _, clean in _blocks(source)), mode=0o600)
    return True


class RedactingFormatter(logging.Formatter):
    """Formats log records without secrets in message, arguments and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def redact_uncaught(clean: Callable[[str], str] = str) -> None:
    """Print tracebacks of uncaught errors without secrets, in all threads, after applying ``clean`` to them."""
    formatter = logging.Formatter()

    def show(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
        sys.stderr.write(redact(clean(formatter.formatException((kind, error or kind(), trace)))) + "\n")

    sys.excepthook = show
    threading.excepthook = lambda args: show(args.exc_type, args.exc_value, args.exc_traceback)


def _redacted(text: str, known: tuple[str, ...]) -> str:
    for form in known:
        text = text.replace(form, MASK)
    if any(mark in text for mark in _CREDENTIAL_MARKS):
        text = CREDENTIAL_FORM.sub(MASK, text)
    text = _URL_USER.sub(f"://{MASK}@", text)
    lower = text.lower()
    if any(mark in lower for mark in _LABEL_MARKS):
        text = _LABELLED.sub(lambda found: found["label"] + MASK, text)
    if "--" in text:
        text = _OPTION_VALUE.sub(lambda found: found["label"] + MASK, text)
    return text


def _blocks(source: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the content in blocks of whole lines, each with its redacted form; non-text bytes are preserved."""
    known = _spellings_now()
    while block := source.read(_BLOCK_BYTES):
        block += source.readline(_MAX_LINE_BYTES)
        clean = _redacted(block.decode("utf-8", "surrogateescape"), known)
        yield block, clean.encode("utf-8", "surrogateescape")


def _spellings_now() -> tuple[str, ...]:
    """Return all spellings of the current secrets in the environment and in the files that it names."""
    values = frozenset(value for _, value in _secret_variables())
    return _all_spellings(values, os.environ.get(_MLFLOW_USER))


def _secret_variables() -> Iterator[tuple[str, str]]:
    """Yield variables with their secrets, or with those in the file that they name."""
    passed = os.environ.get(VARIABLES, "").split(",")
    for name, value in os.environ.items():
        if is_secret_name(name):
            yield name, _token_in(value) if _NAMES_A_FILE.search(name) else value.strip()
        elif name in passed and not _is_path(value):
            yield name, value.strip()
    yield _RAY_TOKEN_FILE, _token_in(f"{os.environ.get('HOME', '')}/{_RAY_TOKEN_FILE}")


def _token_in(file: str) -> str:
    """Return the content of a token file; empty if it is missing or too large for one."""
    try:
        path = Path(file)
        if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
            return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        pass
    return ""


@functools.lru_cache(maxsize=8)
def _all_spellings(values: frozenset[str], user: str | None) -> tuple[str, ...]:
    """Return all spellings of all these secrets, longest first."""
    secrets = {secret for value in values for secret in (value, *_long_lines(value)) if _is_worth_hiding(secret)}
    if user:
        secrets |= {_base64(f"{user}:{secret}") for secret in secrets}
    forms = {form for secret in secrets for form in _spellings(secret)}
    return tuple(sorted(forms, key=len, reverse=True))


def _long_lines(value: str) -> list[str]:
    """Return the long lines of a value such as a private key; each is a secret, because logs are cut into lines."""
    return [line for line in value.splitlines() if len(line) >= 2 * MIN_CHARS] if "\n" in value else []


def _is_worth_hiding(value: str) -> bool:
    return len(value) >= (_MIN_DIGITS if value.isdigit() else MIN_CHARS) and value.lower() not in _NO_SECRETS


def _spellings(value: str) -> Iterator[str]:
    """Yield the value as in URLs, JSON, Python's ``repr``, HTML and ``Authorization`` headers."""
    yield from (value, quote(value), quote(value, safe=""), quote_plus(value), _base64(value))
    yield from (escaped := html.escape(value), escaped.replace("&quot;", "&#34;").replace("&#x27;", "&#39;"))
    yield from (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
