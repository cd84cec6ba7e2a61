"""docker/compose.yml is valid by the Compose specification; no Docker engine is needed to know that."""

from __future__ import annotations

from pathlib import Path

import yaml
from compose_pydantic.models import ComposeSpecification

COMPOSE = Path(__file__).parents[1] / "docker" / "compose.yml"


def test_the_compose_file_keeps_to_the_specification_and_starts_a_minio():
    """The model is generated from the specification's JSON schema and refuses keys that it does not know."""
    composed = ComposeSpecification.model_validate(yaml.safe_load(COMPOSE.read_text()))
    assert composed.services["minio"].image.startswith("minio/minio:")
    assert composed.services["minio"].healthcheck is not None
    assert "minio" in composed.services["bucket"].depends_on
