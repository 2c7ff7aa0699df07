"""Files that other processes read, and dataclasses as JSON. Standard library only."""

from __future__ import annotations

import dataclasses
import enum
import errno
import functools
import hashlib
import json
import operator
import os
import stat
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, Union
from uuid import uuid4

# ---- Atomic writes, and folders that only their owner can read

# With less free space, even small files may be cut off.
FULL_BYTES = 1 << 20


def is_disk_full(path: Path) -> bool:
    """Whether the file system of ``path`` has almost no space or no inodes left for this user; False if unknown."""
    try:
        found = os.statvfs(path)
    except OSError:
        return False
    num_blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail  # root may use reserved blocks
    is_out_of_inodes = found.f_files > 0 and found.f_ffree == 0
    return is_out_of_inodes or (found.f_blocks > 0 and num_blocks * found.f_frsize < FULL_BYTES)


def write_atomically(path: Path, chunks: Iterable[bytes], *, mode: int | None = None) -> None:
    """Write ``chunks`` to ``path`` completely or not at all; a link there is replaced, not followed.

    Args:
        mode: permissions of the file; None leaves them to the umask.

    Raises:
        OSError: it cannot be written; ``path`` is then unchanged.
    """
    temporary = path.with_name(f".{path.name[:64]}.{uuid4().hex[:8]}")
    try:
        with temporary.open("xb") as file:
            if mode is not None:
                temporary.chmod(mode)
            file.writelines(chunks)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises:
        OSError: it cannot be opened, or is a folder, a device or a pipe, from which reading might never end.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe waits for a writer otherwise
    try:
        kind = os.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            code = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
            raise OSError(code, os.strerror(code) if stat.S_ISDIR(kind) else "not a regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: Path) -> str:
    """Read a regular UTF-8 file.

    Raises:
        OSError: see :func:`open_regular`.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path) as file:
        return file.read().decode("utf-8").replace("\r\n", "\n")


def write_json(value: Any, path: Path | None) -> None:
    """Write a JSON value, indented, to the file atomically, or to stdout if ``path`` is None."""
    text = json.dumps(value, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        write_atomically(path, [text.encode()])


def make_private_folder(path: Path) -> Path:
    """Create ``path`` and its missing parents for their owner only; existing folders keep their mode."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    return path


# ---- Frozen dataclasses to plain JSON values and back, strictly
#
# Members of a union have a class variable ``kind``; it is written into the JSON object and selects the class when
# reading. All data that crosses a process boundary or reaches the disk uses this codec: nothing is pickled.

T = TypeVar("T")

ADDED_LATER: Mapping[str, Any] = {"added_later": True}
"""Metadata of a dataclass field that JSON omits at its default, so that digests of earlier values stay the same."""

_SCALARS = (bool, int, float, str)


class CodecError(ValueError):
    """A JSON value does not describe the wanted type; the message starts with the path to the bad part."""


def to_json(value: Any) -> Any:
    """Convert ``value`` (dataclasses, tuples, mappings, string enums, paths, scalars) to JSON-compatible values."""
    if isinstance(value, enum.StrEnum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, _SCALARS):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if (names := _field_names(value.__class__)) is not None:
        body = {name: to_json(getattr(value, name)) for name in names}
        for name, default in _omitted_at_default(value.__class__):
            if body[name] == default:
                del body[name]
        kind = getattr(type(value), "kind", None)
        return {"kind": kind, **body} if isinstance(kind, str) else body
    raise TypeError(f"cannot encode {type(value).__name__}")


def fields_json(value: Any, *names: str) -> dict[str, Any]:
    """Return the named fields and properties as JSON values."""
    return {name: to_json(getattr(value, name)) for name in names}


def from_json(cls: type[T] | Any, data: Any, path: str = "$") -> T:
    """Build ``cls`` (a dataclass, a union of them, a string enum, or a scalar, tuple or dict type) from JSON values.

    Raises:
        CodecError: for an unknown or missing key, an unknown ``kind`` or a value of the wrong type.
    """
    try:
        return typing.cast(T, _quick_decoder(typing.cast(Any, cls))(data))
    except (_MismatchError, KeyError, TypeError):  # decode it again, to find the bad part
        pass
    try:
        return typing.cast(T, _decoder(typing.cast(Any, cls))(data))
    except _MismatchError as wrong:
        raise CodecError("; ".join(f"{path}{part}: {message}" for part, message in wrong.found)) from None


def canonical_json(value: Any) -> str:
    """Return the unique text of a value: sorted keys, no spaces, no NaN. Hashes are computed from it."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 of :func:`canonical_json`, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


_Decode = Callable[[Any], Any]


class _MismatchError(Exception):
    """Mismatched JSON values: messages, each with the path to the bad part as far as known.

    Paths are assembled only on errors, because a ledger has far more good values than bad ones.
    """

    def __init__(self, *found: tuple[str, str]) -> None:
        super().__init__()
        self.found = found

    def below(self, part: str) -> _MismatchError:
        return _MismatchError(*((part + path, message) for path, message in self.found))


@functools.cache
def _decoder(cls: Any) -> _Decode:
    """Return the cached function that decodes JSON values to ``cls`` or raises :class:`_MismatchError`."""
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if cls is Any:
        return lambda data: data
    if origin in (Union, types.UnionType):
        return _union_decoder(args)
    if origin is Literal:
        return lambda data: _expect(any(data == arg and type(data) is type(arg) for arg in args), data, cls)
    if origin is tuple:
        return _tuple_decoder(cls, args[0])
    if origin in (dict, Mapping):
        return _mapping_decoder(cls, args[1])
    if dataclasses.is_dataclass(cls):
        return _dataclass_decoder(cls)
    if isinstance(cls, type) and issubclass(cls, enum.StrEnum):
        return _enum_decoder(cls)
    return _scalar_decoder(cls)


def _enum_decoder(cls: type[enum.StrEnum]) -> _Decode:
    members = {member.value: member for member in cls}
    return lambda data: members[_expect(isinstance(data, str) and data in members, data, cls)]


def _scalar_decoder(cls: Any) -> _Decode:
    if cls is type(None):
        return lambda data: _expect(data is None, data, cls)
    if cls is float:
        return lambda data: float(_expect(isinstance(data, int | float) and not isinstance(data, bool), data, cls))
    if cls is int:
        return lambda data: _expect(isinstance(data, int) and not isinstance(data, bool), data, cls)
    return lambda data: _expect(isinstance(data, cls), data, cls)


def _tuple_decoder(cls: Any, item: Any) -> _Decode:
    decode_item = _decoder(item)

    def decode(data: Any) -> tuple[Any, ...]:
        _expect(isinstance(data, list | tuple), data, cls)
        items: list[Any] = []
        try:
            for value in data:
                items.append(decode_item(value))
        except _MismatchError as wrong:
            raise wrong.below(f"[{len(items)}]") from None
        return tuple(items)

    return decode


def _mapping_decoder(cls: Any, value_type: Any) -> _Decode:
    decode_value = _decoder(value_type)

    def decode(data: Any) -> dict[Any, Any]:
        return _decoded_values(_expect(isinstance(data, Mapping), data, cls), lambda _: decode_value)

    return decode


def _union_decoder(members: tuple[Any, ...]) -> _Decode:
    optional = type(None) in members
    all_members = [_decoder(member) for member in members]
    kinds = [getattr(member, "kind", None) for member in members]
    of_any_kind = [decode for decode, own in zip(all_members, kinds, strict=True) if own is None]
    of_kind = {
        kind: [decode for decode, own in zip(all_members, kinds, strict=True) if own in (kind, None)] for kind in kinds
    }

    def decode(data: Any) -> Any:
        if data is None and optional:
            return None
        kind = data.get("kind") if isinstance(data, Mapping) else None
        possible = all_members if kind is None else of_kind.get(kind if isinstance(kind, str) else None, of_any_kind)
        found: list[tuple[str, str]] = []
        for decode_member in possible:
            try:
                return decode_member(data)
            except _MismatchError as wrong:
                found += wrong.found
        raise _MismatchError(*(found or [("", f"unknown kind {kind!r}")]))

    return decode


def _dataclass_decoder(cls: Any) -> _Decode:
    @functools.cache
    def decoders() -> dict[str, _Decode]:
        """Return the decoder of every field by name."""
        hints = typing.get_type_hints(cls)
        return {field.name: _decoder(hints[field.name]) for field in dataclasses.fields(cls)}

    def decode(data: Any) -> Any:
        by_name = decoders()
        body = _expect(isinstance(data, Mapping), data, cls)
        if "kind" in body and "kind" not in by_name:
            body = {key: value for key, value in body.items() if key != "kind"}
        if unknown := body.keys() - by_name.keys():
            known = ", ".join(sorted(by_name))
            raise _MismatchError(("", f"unknown key {min(unknown)!r} for {cls.__name__}; known: {known}"))
        decoded = _decoded_values(body, by_name.__getitem__)
        try:
            return cls(**decoded)
        except TypeError as error:
            raise _MismatchError(("", str(error))) from None

    return decode


def _decoded_values(data: Mapping[Any, Any], decoder_of: Callable[[Any], _Decode]) -> dict[Any, Any]:
    decoded = {}
    key: Any = None
    try:
        for key, value in data.items():
            decoded[key] = decoder_of(key)(value)
    except _MismatchError as wrong:
        raise wrong.below(f".{key}") from None
    return decoded


# The same, faster, for ledgers with millions of values. A value accepted here has the same result as
# above; errors only say that it needs to be decoded as above.


@functools.cache
def _quick_decoder(cls: Any) -> _Decode:
    """Return a faster function for values that :func:`_decoder` accepts. For others, it may raise
    :class:`_MismatchError`, ``KeyError`` or ``TypeError``."""
    origin, args = typing.get_origin(cls), typing.get_args(cls)
    if origin in (Union, types.UnionType):
        return _quick_union_decoder(cls, args)
    if origin is tuple:
        return _quick_tuple_decoder(cls, args[0])
    if origin is Literal:
        return _quick_literal_decoder(cls, args)
    if dataclasses.is_dataclass(cls):
        return _quick_dataclass_decoder(cls)
    return _decoder(cls)


def _quick_literal_decoder(cls: Any, args: tuple[Any, ...]) -> _Decode:
    words, decode_other = frozenset(arg for arg in args if arg.__class__ is str), _decoder(cls)
    return lambda data: data if data.__class__ is str and data in words else decode_other(data)


def _quick_union_decoder(cls: Any, members: tuple[Any, ...]) -> _Decode:
    """Return a function that finds the member by its kind, or knows the only one, which has none; else that of
    :func:`_decoder`."""
    present = [member for member in members if member is not type(None)]
    kinds = [getattr(member, "kind", None) for member in present]
    if kinds == [None]:
        decode_member = _quick_decoder(present[0])
        return lambda data: None if data is None else decode_member(data)
    if len(set(kinds)) < len(kinds) or not all(isinstance(kind, str) for kind in kinds):
        return _decoder(cls)
    of_kind = {kind: _quick_decoder(member) for kind, member in zip(kinds, present, strict=True)}
    if len(present) == len(members):
        return lambda data: of_kind[data["kind"]](data)
    return lambda data: None if data is None else of_kind[data["kind"]](data)


def _quick_tuple_decoder(cls: Any, item: Any) -> _Decode:
    if item in (int, float, str, bool):
        whole, decode_all = {item}, _decoder(cls)
        return lambda data: (
            tuple(data) if data.__class__ is list and whole.issuperset(map(type, data)) else decode_all(data)
        )
    decode_item = _quick_decoder(item)
    decode_all = _decoder(cls)
    return lambda data: (*map(decode_item, data),) if data.__class__ is list else decode_all(data)


def _quick_dataclass_decoder(cls: Any) -> _Decode:
    """Return a function that decodes equal values of a few words and whole numbers, such as devices, only once."""
    decode = _quick_object_decoder(cls)
    names = _field_names(cls) or ()
    if len(names) < 2 or not cls.__dataclass_params__.frozen or not _are_short(cls):
        return decode
    values_of, num = operator.itemgetter(*names), len(names)
    made = functools.lru_cache(maxsize=4096, typed=True)(lambda *values: decode(dict(zip(names, values, strict=True))))
    return lambda data: made(*values_of(data)) if len(data) == num else decode(data)


def _are_short(cls: Any) -> bool:
    """Whether all fields are words or whole numbers, by their annotations."""
    return {field.type for field in dataclasses.fields(cls)} <= {"int", "str", "bool"}


def _quick_object_decoder(cls: Any) -> _Decode:
    """Return a function that reads the fields' types on its first use: a class may contain itself, or name later
    classes."""
    fields_of = functools.cache(lambda: _quick_fields(cls))
    has_kind = any(field.name == "kind" for field in dataclasses.fields(cls))

    def decode(data: Any) -> Any:
        if data.__class__ is not dict:
            raise _MismatchError
        values = {}
        for name, is_optional, plain, decode_field in fields_of():
            if is_optional and name not in data:
                continue
            value = data[name]
            values[name] = value if value.__class__ in plain else decode_field(value)
        if len(values) + (not has_kind and "kind" in data) != len(data):
            raise _MismatchError
        return cls(**values)

    return decode


def _quick_fields(cls: Any) -> tuple[tuple[str, bool, frozenset[type], _Decode], ...]:
    """Return for each field its name, whether it has a default, the classes of values that stay as they are, and the
    function for others."""
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING,
            _unchanged(hints[field.name]),
            _quick_decoder(hints[field.name]),
        )
        for field in dataclasses.fields(cls)
    )


def _unchanged(hint: Any) -> frozenset[type]:
    """Return classes of JSON values that decode to themselves; others may, too."""
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    if not {*members} <= {*_SCALARS, type(None)}:
        return frozenset({type(None)} & {*members})
    numbers = [member for member in members if member in (int, float)]
    return frozenset(members) - ({int} if numbers == [float, int] else set())


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields; None for other types."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


@functools.cache
def _omitted_at_default(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Return fields marked with :data:`ADDED_LATER`, with their defaults."""
    return tuple((field.name, field.default) for field in dataclasses.fields(cls) if field.metadata.get("added_later"))


def _expect(condition: bool, data: Any, cls: Any) -> Any:
    if not condition:
        raise _MismatchError(("", f"expected {getattr(cls, '__name__', cls)}, got {data!r}"))
    return data
