"""Write the files of src/ratekeeper/service/envoy/protocol/ that come from its .proto files.

    python -m tests.service.envoy.generate

`files.py` holds the compiled .proto files and `messages.pyi` what mypy knows of the messages. Not
protoc's own Python: that registers the messages for the whole process, where another package may
have registered Envoy's already, and refuses to run with an older protobuf than it was made with.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

SOURCE = Path(__file__).parents[3] / "src"
FOLDER = "ratekeeper/service/envoy/protocol"
# Each file comes after its imports.
PROTOS = (
    *("headers.proto", "units.proto", "descriptors.proto", "service.proto"),
    *("token_buckets.proto", "strategies.proto", "quotas.proto"),
)

_BYTES_IN_A_LINE = 48
_HEAD = "Generated from the .proto files beside it by tests/service/envoy/generate.py."

_SCALARS = {
    FieldDescriptorProto.TYPE_STRING: "str",
    FieldDescriptorProto.TYPE_BYTES: "bytes",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_UINT32: "int",
    FieldDescriptorProto.TYPE_UINT64: "int",
    FieldDescriptorProto.TYPE_ENUM: "int",
}
# The only maps are of text to text.
_MAP = "MutableMapping[str, str]"
_MAP_GIVEN = "Mapping[str, str] | None"
_WELL_KNOWN = {
    ".google.protobuf.Duration": "Duration",
    ".google.protobuf.Struct": "Struct",
    ".google.protobuf.Timestamp": "Timestamp",
    ".google.protobuf.UInt32Value": "UInt32Value",
    ".google.protobuf.UInt64Value": "UInt64Value",
}


def compiled() -> list[FileDescriptorProto]:
    """Compile our .proto files with protoc, without comments."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "set"
        known = files("grpc_tools") / "_proto"
        names = [f"{FOLDER}/{name}" for name in PROTOS]
        options = [f"-I{SOURCE}", f"-I{known}", f"--descriptor_set_out={target}"]
        if protoc.main(["protoc", *options, *names]):
            raise AssertionError("protoc did not compile the .proto files; see its output")
        found = {each.name: each for each in FileDescriptorSet.FromString(target.read_bytes()).file}
    ours = [found[name] for name in names]
    for each in ours:
        _without_json_names(each.message_type)
    return ours


def _without_json_names(messages: object) -> None:
    # protoc adds these names, and the reader of the files derives them again.
    for message in messages:  # type: ignore[attr-defined]  # a repeated field
        for field in message.field:
            field.ClearField("json_name")
        _without_json_names(message.nested_type)


def python_of(protos: list[FileDescriptorProto]) -> str:
    """Return the text of files.py."""
    lines = [f'"""{_HEAD}"""', "", "from typing import Final", "", "FILES: Final = ("]
    for proto in protos:
        text = proto.SerializeToString(deterministic=True).hex()
        step = 2 * _BYTES_IN_A_LINE
        lines += [f"    # {proto.name.rpartition('/')[2]}", '    """']
        lines += [f"    {text[at : at + step]}" for at in range(0, len(text), step)]
        lines.append('    """,')
    return "\n".join([*lines, ")", ""])


def stub_of(protos: list[FileDescriptorProto]) -> str:
    """Return the text of messages.pyi."""
    lines = [
        f"# {_HEAD}",
        "# ruff: noqa: A002, E501 - the names are Envoy's, and long",
        "# fmt: off",
        "from collections.abc import Iterable, Mapping, MutableMapping",
        "from typing import Any, Final",
        "",
        "from google.protobuf.descriptor_pool import DescriptorPool",
        "from google.protobuf.duration_pb2 import Duration",
        "from google.protobuf.internal.containers import RepeatedCompositeFieldContainer",
        "from google.protobuf.message import Message",
        "from google.protobuf.struct_pb2 import Struct",
        "from google.protobuf.timestamp_pb2 import Timestamp",
        "from google.protobuf.wrappers_pb2 import UInt32Value, UInt64Value",
        "",
        "POOL: Final[DescriptorPool]",
        "SERVICE: Final[str]",
        "QUOTA_SERVICE: Final[str]",
    ]
    for proto in protos:
        for message in proto.message_type:
            lines += ["", *_class(message)]
    return "\n".join([*lines, ""])


def _class(message: DescriptorProto) -> Iterator[str]:
    yield f"class {message.name}(Message):"
    maps = {each.name for each in message.nested_type if each.options.map_entry}
    for nested in message.nested_type:
        if nested.name in maps:
            continue
        yield from (f"    {line}" if line else "" for line in _class(nested))
        yield ""
    for enum in message.enum_type:
        yield from _values(enum)
    for field in message.field:
        is_map = field.type_name.rpartition(".")[2] in maps
        yield f"    {field.name}: {_MAP if is_map else _type(field)}"
    yield "    def __init__("
    yield "        self,"
    if message.field:
        yield "        *,"
    for field in message.field:
        is_map = field.type_name.rpartition(".")[2] in maps
        yield f"        {field.name}: {_MAP_GIVEN if is_map else _given(field)} = ...,"
    yield "    ) -> None: ..."


def _values(enum: EnumDescriptorProto) -> Iterator[str]:
    for value in enum.value:
        yield f"    {value.name}: Final = {value.number}"


def _type(field: FieldDescriptorProto) -> str:
    if field.type != FieldDescriptorProto.TYPE_MESSAGE:
        return _SCALARS[field.type]
    name = _WELL_KNOWN.get(field.type_name) or _own(field.type_name)
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"RepeatedCompositeFieldContainer[{name}]" if repeated else name


def _given(field: FieldDescriptorProto) -> str:
    if field.type != FieldDescriptorProto.TYPE_MESSAGE:
        return f"{_SCALARS[field.type]} | None"
    name = _WELL_KNOWN.get(field.type_name) or _own(field.type_name)
    one = f"{name} | Mapping[str, Any]"
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    return f"Iterable[{one}] | None" if repeated else f"{one} | None"


def _own(type_name: str) -> str:
    # Packages begin with a small letter, messages with a capital: `.envoy.a.v3.Outer.Inner`.
    return ".".join(part for part in type_name.split(".") if part[:1].isupper())


def main() -> None:
    """Write both files."""
    protos = compiled()
    (SOURCE / FOLDER / "files.py").write_text(python_of(protos), encoding="utf-8")
    (SOURCE / FOLDER / "messages.pyi").write_text(stub_of(protos), encoding="utf-8")


if __name__ == "__main__":
    main()
