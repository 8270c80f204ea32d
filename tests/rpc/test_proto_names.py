"""The wire contract keeps to the naming that buf's STANDARD rules ask for."""

from __future__ import annotations

import re

import pytest
from google.protobuf.descriptor import Descriptor, FileDescriptor

from tierkv.v1 import node_service_pb2, telemetry_pb2, vault_service_pb2

FILES = [module.DESCRIPTOR for module in (node_service_pb2, telemetry_pb2, vault_service_pb2)]


def messages(file: FileDescriptor) -> list[Descriptor]:
    return list(file.message_types_by_name.values())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_package_and_folder_agree(file: FileDescriptor):
    assert file.package == "tierkv.v1"
    assert file.name.startswith("tierkv/v1/")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_names_are_in_the_right_case(file: FileDescriptor):
    for message in messages(file):
        assert re.fullmatch(r"([A-Z][a-z0-9]*)+", message.name)
        assert all(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", field.name) for field in message.fields)
        numbers = sorted(field.number for field in message.fields)
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_method_has_a_request_and_a_response_of_its_own(file: FileDescriptor):
    seen: set[str] = set()
    for service in file.services_by_name.values():
        assert service.name.endswith("Service")
        for method in service.methods:
            pair = {method.input_type.name, method.output_type.name}
            assert pair == {f"{method.name}Request", f"{method.name}Response"}
            assert not pair & seen
            seen |= pair
