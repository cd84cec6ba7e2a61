"""storage_options, as s3fs and gcsfs understand them, in obstore's words. Pure: values in, values out.

What cannot be said in obstore's words is named in a `UsageError`; with no transport asked for, that means fsspec is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamshard.errors import UsageError
from streamshard.storage.policy import StoragePolicy


@dataclass(slots=True)
class StoreArguments:
    """Arguments of an obstore store. `chain`: credentials come from botocore's chain (of `profile`), not from values."""

    config: dict[str, Any]
    client: dict[str, Any] = field(default_factory=dict)
    chain: bool = False
    profile: str | None = None


def s3_arguments(options: Mapping[str, Any], policy: StoragePolicy) -> StoreArguments:
    """For an S3Store. Region, endpoint and certificate authority may still come from botocore's configuration."""
    given = _Options(options)
    client = _Options(given.take("client_kwargs") or {}, "client_kwargs.")
    config = _Options(given.take("config_kwargs") or {}, "config_kwargs.")
    s3 = _Options(config.take("s3") or {}, "config_kwargs.s3.")
    key = given.take("key") or given.take("username") or client.take("aws_access_key_id")
    secret = given.take("secret") or given.take("password") or client.take("aws_secret_access_key")
    token = given.take("token") or client.take("aws_session_token")
    endpoint = client.take("endpoint_url") or given.take("endpoint_url")
    style = s3.take("addressing_style") or "auto"
    out = StoreArguments(
        {
            "disable_bulk_delete": True,
            "virtual_hosted_style_request": style == "virtual" or (style == "auto" and not endpoint),
        }
    )
    if given.take("anon"):
        out.config["skip_signature"] = True
    elif key:
        out.config |= {"access_key_id": key, "secret_access_key": secret or ""}
        out.config |= {"session_token": token} if token else {}
    else:
        out.chain = True
    out.profile = given.take("profile")
    if endpoint:
        out.config["endpoint"] = endpoint
    if region := client.take("region_name") or config.take("region_name") or given.take("region_name"):
        out.config["region"] = region
    if given.take("requester_pays"):
        out.config["request_payer"] = True
    out.client = _client(policy)
    _verify(client.take("verify"), out.client)
    for harmless in ("connect_timeout", "read_timeout", "max_pool_connections", "retries"):
        config.take(harmless)
    for harmless in ("use_listings_cache", "use_ssl", "default_block_size", "default_cache_type", "default_fill_cache"):
        given.take(harmless)
    client.take("use_ssl")
    for rest in (given, client, config, s3):
        rest.refuse_rest()
    return out


def gcs_arguments(options: Mapping[str, Any], policy: StoragePolicy) -> StoreArguments:
    """For a GCSStore."""
    given = _Options(options)
    out = StoreArguments({}, _client(policy))
    endpoint = given.take("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST")
    token = given.take("token")
    if endpoint and token in (None, "anon"):
        # An emulator: skip_signature alone would still fetch a token for writes.
        base = endpoint if "://" in endpoint else f"http://{endpoint}"
        emulator = {
            "gcs_base_url": base,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        out.config["service_account_key"] = json.dumps(emulator)
    elif token == "anon":  # noqa: S105
        out.config["skip_signature"] = True
    elif isinstance(token, dict):
        out.config["service_account_key"] = json.dumps(token)
    elif isinstance(token, str) and os.path.exists(token):
        out.config["application_credentials"] = token
    elif token not in (None, "google_default"):
        raise UsageError(
            f"storage_options token={type(token).__name__} cannot be used by obstore; pass transport='fsspec'"
        )
    for harmless in ("project", "use_listings_cache", "requests_timeout", "timeout", "access", "consistency"):
        given.take(harmless)
    given.refuse_rest()
    return out


def other_arguments(options: Mapping[str, Any], policy: StoragePolicy) -> StoreArguments:
    """For Azure: the names are obstore's, and those of adlfs that mean the same."""
    same = {"account_name": "account_name", "account_key": "account_key", "sas_token": "sas_key",
            "tenant_id": "tenant_id", "client_id": "client_id", "client_secret": "client_secret"}  # fmt: skip
    out = StoreArguments({}, _client(policy))
    for name, value in options.items():
        if name == "anon":
            out.config["skip_signature"] = bool(value)
        elif name != "use_listings_cache":
            out.config[same.get(name, name)] = value
    return out


def _client(policy: StoragePolicy) -> dict[str, Any]:
    """HTTP settings: our own time limits are shorter than these and know more."""
    return {
        "allow_http": True,  # the URL of the endpoint says which
        "connect_timeout": f"{max(1, round(policy.connect_s * 1000))}ms",
        "timeout": "24h",
        "pool_max_idle_per_host": str(policy.limit_max),
    }


def _verify(verify: Any, client: dict[str, Any]) -> None:
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        try:
            with open(verify, "rb") as file:
                client["root_certificate"] = file.read()
        except OSError as error:
            raise UsageError(
                f"client_kwargs={{'verify': {verify!r}}}: {error.strerror}; pass the path of a PEM file"
            ) from error


class _Options:
    """A copy of options from which what is understood is taken, so that the rest can be named."""

    def __init__(self, options: Mapping[str, Any], path: str = "") -> None:
        self._rest = dict(options)
        self._path = path

    def take(self, name: str) -> Any:
        return self._rest.pop(name, None)

    def refuse_rest(self) -> None:
        rest = [self._path + name for name, value in self._rest.items() if value not in (None, {}, False)]
        if rest:
            raise UsageError(
                f"storage_options {rest} mean nothing to obstore; leave them out or pass transport='fsspec'"
            )
