"""Manifests: what is signed, what is accepted, and what a line refuses by its number or age."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from daemon.registry.manifest import (
    Manifest,
    ReleaseError,
    SignedManifest,
    StoredFile,
    canonical,
    decode,
    parse_release,
    refusal,
    signer_of,
)
from daemon.registry.signing import signature_of

AT = datetime(2026, 11, 27, tzinfo=UTC)
ENTRY = {"architecture": "resnet18", "file": "", "input_size": 32, "normalisation": "none", "sha256": "a" * 64}


def a_manifest(**fields: Any) -> Manifest:
    made = {"made_at": "2026-11-26T10:00:00Z", "expires_at": "2027-02-26T10:00:00Z", "made_by": "anna", "line": "a"}
    return Manifest.model_validate({"name": "line", "number": 7, **made, **fields})


def test_a_manifest_reads_back_as_it_was_written():
    made = a_manifest(experts={"R/0402": {"bytes": 5, "entry": ENTRY}}, rules=StoredFile(sha256="b" * 64, bytes=9))
    assert decode(made.encoded(), "line/7") == made
    assert made.files == {"a" * 64: 5, "b" * 64: 9}


@pytest.mark.promise(
    "Prepared files",
    "a release | a path that leads out of the folder | manifests name files by sha256 only; one with a path is refused",
)
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"experts": {"P": {"bytes": 5, "entry": {**ENTRY, "file": "../../etc/shadow"}}}}, "names a path"),
        ({"experts": {"P": {"bytes": 5, "entry": ENTRY | {"backbone": {"file": "/x", "sha256": "c" * 64}}}}}, "a path"),
        ({"experts": {"P": {"bytes": 5, "entry": ENTRY | {"backbone": {"file": "", "sha256": "c" * 64}}}}}, "it lacks"),
        ({"rules": {"sha256": "b" * 64, "bytes": 5 << 20}}, "at most 4194304 are taken"),
        ({"rules": {"sha256": "../../x", "bytes": 5}}, "rules.sha256"),
        ({"name": "../line"}, "name: "),
        ({"number": 0}, "number: "),
        ({"expires_at": "2027-02-31T10:00:00Z"}, "day value is outside expected range"),
        ({"format": "coserve-release-2"}, "format: "),
        ({"more": 1}, "more: "),
    ],
)
def test_a_manifest_that_names_a_path_or_is_not_canonical_is_refused(changed: dict[str, Any], reason: str):
    document = json.loads(a_manifest().encoded()) | changed
    with pytest.raises(ReleaseError, match=reason):
        decode(canonical(document), "line/7")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"number":7,"number":8}', b"null"])
def test_bytes_that_are_not_a_manifest_are_refused_by_name(data: bytes):
    with pytest.raises(ReleaseError, match="line/7 is not a release"):
        decode(data, "line/7")


def test_spaces_and_repeated_keys_are_not_what_was_signed():
    data = a_manifest().encoded()
    for other in (data + b"\n", data.replace(b":7", b": 7"), data.replace(b'"number":7', b'"number":8,"number":7')):
        with pytest.raises(ReleaseError, match="canonical form"):
            decode(other, "line/7")


def test_only_a_named_signer_of_exactly_these_bytes_is_accepted():
    anna, mallory = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    data = a_manifest().encoded()
    signed = SignedManifest(data, signature_of(data, anna).encode())
    keys = {Path("keys/mallory.sign"): mallory.public_key(), Path("keys/anna.sign"): anna.public_key()}
    assert signer_of(signed, keys, "line/7") == Path("keys/anna.sign")
    with pytest.raises(ReleaseError, match=r"signed by nobody in plant.signers \(mallory.sign\)"):
        signer_of(signed, {Path("keys/mallory.sign"): mallory.public_key()}, "line/7")
    with pytest.raises(ReleaseError, match="accepts no signers"):
        signer_of(signed, {}, "line/7")
    with pytest.raises(ReleaseError, match="cut off or changed"):
        signer_of(SignedManifest(data, signed.signature[:40]), keys, "line/7")
    with pytest.raises(ReleaseError, match="signed by nobody"):
        signer_of(SignedManifest(data.replace(b":7", b":8"), signed.signature), keys, "line/7")


def test_an_old_number_and_an_expired_release_are_refused_without_a_person():
    made = a_manifest()
    assert refusal(made, None, AT) is None
    assert refusal(made, 7, AT) is None
    assert "older than line/8" in str(refusal(made, 8, AT))
    assert "expired at 2027-02-26" in str(refusal(made, None, made.expires_at))
    assert refusal(made, 8, made.expires_at + timedelta(days=300), allow_older=True) is None


@pytest.mark.parametrize("text", ["line", "line/", "line/0", "line/-1", "line/1/2", "../1", "/1", "line/١", "a b/1"])
def test_a_release_that_is_not_name_and_number_is_refused(text: str):
    with pytest.raises(ReleaseError, match="expected NAME/NUMBER"):
        parse_release(text)
